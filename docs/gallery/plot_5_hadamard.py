"""
A Hadamard transform spreads outliers
=====================================

One large value sets the scale of its block and pushes the others to zero. Turning the block by a
Hadamard matrix first spreads it over all values; a GEMM whose two operands are both turned gives
the same product.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

rng = np.random.default_rng(0)
noise = rng.standard_normal((2048, 64)).astype(np.float32)
sizes = np.array([1, 3, 10, 30, 100, 300], np.float32)
plain = et.QuantSpec("mxfp4", scale_rule="rceil")
turned = et.QuantSpec("mxfp4", scale_rule="rceil", transform=et.Hadamard(32))


def error(spec, values):
    """Error of a product, both operands quantized, over the product without the large channel."""
    w = et.ExTensor.randn((64, 64), seed=1)
    exact = values.astype(np.float64) @ w.numpy().astype(np.float64).T
    product = (et.from_numpy(values).quantize(spec) @ w.quantize(spec).T).numpy()
    return np.linalg.norm(product - exact) / np.linalg.norm(noise @ w.numpy().T)


curves = {"MXFP4": [], "MXFP4, Hadamard-32": []}
for size in sizes:
    values = noise.copy()
    values[:, 5] *= size  # one channel far above the others
    curves["MXFP4"].append(error(plain, values))
    curves["MXFP4, Hadamard-32"].append(error(turned, values))

figure, axis = plt.subplots(figsize=(7, 4))
for label, curve in curves.items():
    axis.plot(sizes, curve, "o-", label=label)
axis.set(xscale="log", yscale="log", xlabel="size of one channel of 64")
axis.set_ylabel("error of the product, relative")
axis.legend()
figure.tight_layout()

# %%
# The gain is largest where one channel is about ten times the others. Beyond that the turned
# block is all outlier: its noise, now shared by all values, grows with it. Training recipes use
# the transform on gradients, whose outliers are of the first kind.
