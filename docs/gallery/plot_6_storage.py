"""
Codes and scales of a real weight
=================================

A blocked tensor is two arrays. Left the codes of a convolution's weights in MXFP4, right the
exponents of the block scales: large and small filters keep their own range.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

rng = np.random.default_rng(0)
layer = et.nn.Conv2d(16, 32, 5, rng=rng)
spread = np.exp(rng.standard_normal((32, 1))).astype(np.float32)  # filters of different sizes
weight = et.from_numpy(layer.weight.numpy().reshape(32, -1)[:, :384] * spread)
q = weight.to_mxfp4()

values = q.dequantize().numpy() / 2.0 ** (np.repeat(q.scales, 32, axis=1).astype(int) - 127)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(3, 1.2))
image = left.imshow(values, cmap="RdBu", vmin=-6, vmax=6, aspect="auto", interpolation="nearest")
figure.colorbar(image, ax=left, label="code's value")
left.set(xlabel="weight", ylabel="filter", title=f"codes, {np.asarray(q.codes).nbytes:,} bytes")
image = right.imshow(np.asarray(q.scales).astype(int) - 127, cmap="viridis", aspect="auto")
figure.colorbar(image, ax=right, label="scale, log2")
right.set(xlabel="block", title=f"scales, {np.asarray(q.scales).nbytes:,} bytes")
figure.tight_layout()

# %%
q.nbytes, weight.nbytes
