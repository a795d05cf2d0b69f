"""scipy and scikit-learn on extensor's tensors, which they take as any array of the standard.

    SCIPY_ARRAY_API=1 python -m tests.array_api.users

Prints, as JSON, what each case got wrong: nothing, or an error. A program of its own, for scipy
reads the variable when it is first imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
from scipy import cluster, fft, integrate, special, stats
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

import extensor as et

X = np.random.default_rng(0).normal(size=(60, 4))
LABELS = (X[:, 0] + X[:, 1] > 0).astype(np.int64)

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "scipy.cluster.hierarchy.linkage": lambda x, y: cluster.hierarchy.linkage(x),
    "scipy.cluster.vq.whiten": lambda x, y: cluster.vq.whiten(x),
    "scipy.fft.fft": lambda x, y: fft.fft(x, axis=0),
    "scipy.integrate.trapezoid": lambda x, y: integrate.trapezoid(x),
    "scipy.special.erf": lambda x, y: special.erf(x),
    "scipy.special.expit": lambda x, y: special.expit(x),
    "scipy.special.logsumexp": lambda x, y: special.logsumexp(x, axis=1),
    "scipy.special.softmax": lambda x, y: special.softmax(x, axis=1),
    "scipy.special.xlogy": lambda x, y: special.xlogy(x**2, x**2),
    "scipy.stats.entropy": lambda x, y: stats.entropy(x**2),
    "scipy.stats.gmean": lambda x, y: stats.gmean(x**2),
    "scipy.stats.kurtosis": lambda x, y: stats.kurtosis(x),
    "scipy.stats.moment": lambda x, y: stats.moment(x, 3),
    "scipy.stats.pearsonr": lambda x, y: stats.pearsonr(x[:, 0], x[:, 1]).statistic,
    "scipy.stats.skew": lambda x, y: stats.skew(x),
    "scipy.stats.ttest_1samp": lambda x, y: stats.ttest_1samp(x, 0.0).pvalue,
    "scipy.stats.zscore": lambda x, y: stats.zscore(x),
    "sklearn LinearDiscriminantAnalysis": lambda x, y: (
        LinearDiscriminantAnalysis().fit(x, y).predict_proba(x)
    ),
    "sklearn MinMaxScaler": lambda x, y: MinMaxScaler().fit_transform(x),
    "sklearn Normalizer": lambda x, y: Normalizer().fit_transform(x),
    "sklearn PCA": lambda x, y: PCA(2, svd_solver="full").fit_transform(x),
    "sklearn Ridge": lambda x, y: Ridge(solver="svd").fit(x, x[:, 0]).coef_,
    "sklearn StandardScaler": lambda x, y: StandardScaler().fit_transform(x),
    "sklearn accuracy_score": lambda x, y: accuracy_score(y, 1 - y),
    "sklearn r2_score": lambda x, y: r2_score(x[:, 0], x[:, 1]),
    "sklearn train_test_split": lambda x, y: train_test_split(x, random_state=0)[1],
}


def judged(case: Callable[[Any, Any], Any]) -> str:
    """What is wrong with a case, on tensors beside numpy: "" if nothing."""
    try:
        with sklearn.config_context(array_api_dispatch=True):
            got, expected = (case(to(X), to(LABELS)) for to in (et.asarray, np.asarray))
        if isinstance(expected, np.ndarray):
            assert isinstance(got, et.ExTensor), f"expected an ExTensor, got {type(got)}"
        # float64; conditions here stay below 1e3
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-11, atol=1e-12)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    json.dump({name: judged(case) for name, case in CASES.items()}, sys.stdout)
