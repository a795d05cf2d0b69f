"""Sampling: the kept tokens and probabilities are those of transformers; draws by Philox."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from extensor.generation import Sampling, sample, token_probabilities

SETTINGS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product((0.3, 1.7), (0, 7), (1.0, 0.8), (0.0, 0.1), (1.0, 1.3))
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_probabilities_are_those_of_transformers(settings: dict[str, float]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(5)
    scores = (3 * rng.standard_normal(200)).astype(np.float32)
    seen = rng.integers(0, 200, 30)
    steps: list[object] = []
    if settings["repetition_penalty"] != 1.0:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    steps.append(transformers.TemperatureLogitsWarper(settings["temperature"]))
    if settings["top_k"]:
        steps.append(transformers.TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] < 1.0:
        steps.append(transformers.TopPLogitsWarper(settings["top_p"]))
    if settings["min_p"]:
        steps.append(transformers.MinPLogitsWarper(settings["min_p"]))
    theirs = torch.from_numpy(scores)[None]
    for step in steps:
        theirs = step(torch.from_numpy(seen)[None], theirs)
    expected = torch.softmax(theirs[0].double(), -1).numpy()
    tokens, p = token_probabilities(scores, seen, Sampling(**settings))  # type: ignore[arg-type]
    assert tokens.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(p, expected[tokens], rtol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    scores = np.log(np.float32([[0.5, 0.3, 0.15, 0.05]]))
    how = Sampling(temperature=1.0, seed=11)
    counts = np.bincount([int(sample(scores, [[]], how, n)[0]) for n in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.025)


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    scores = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    seen = [np.array([], int)] * 3
    how = Sampling(temperature=1.0, seed=(4, 5, 6))
    together = [sample(scores, seen, how, n).tolist() for n in range(20)]
    alone = [
        [int(sample(scores[[r]], seen[:1], Sampling(1.0, seed=4 + r), n)[0]) for r in range(3)]
        for n in range(20)
    ]
    assert together == alone
    assert len({tuple(row) for row in together}) > 10


def test_the_first_of_equal_scores_is_the_best() -> None:
    assert sample(np.float32([[1, 3, 3]]), [np.array([])], Sampling(), 0).tolist() == [1]
    assert sample(np.float32([[1, 3, 3]]), [[1]], Sampling(repetition_penalty=2.0), 0)[0] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"temperature": -1.0},
            "temperature: expected 0, or a finite number of 1e-30 or more, got",
        ),
        ({"temperature": 1e-45}, "temperature: expected 0, .*got 1e-45"),  # 0 or 1.4e-45 as float32
        ({"top_k": 1.5}, "top_k: expected a whole number"),
        ({"top_p": 0.0}, "top_p: expected a number above 0"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


def test_scores_that_are_not_finite_are_refused() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="expected finite scores"):
            sample(np.float32([[1, np.nan]]), [[]], Sampling(temperature), 0)
    with pytest.raises(ValueError, match="one for each of 3 rows"):
        sample(np.zeros((3, 2), np.float32), [[]] * 3, Sampling(seed=(1, 2)), 0)
