"""
Why gradients are rounded at random
===================================

Rounding to nearest sends every value below a quarter of the scale to zero: on average, small
gradients disappear. Stochastic rounding goes up or down with the right probabilities, so its
mean over many draws is the value itself.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

values = np.linspace(0, 1.5, 61, dtype=np.float32)
block = np.concatenate([[6.0], np.zeros(2, np.float32), values]).astype(np.float32)[None]
x = et.from_numpy(block)  # 6 fixes the block's scale at 1

draws = 400
spec = et.QuantSpec("mxfp4", tile=(1, 64), rounding="stochastic")
total = np.zeros(61)
for seed in range(draws):
    total += x.quantize(spec, seed=seed).dequantize().numpy()[0, 3:]
nearest = x.quantize(et.QuantSpec("mxfp4", tile=(1, 64))).dequantize().numpy()[0, 3:]

figure, axis = plt.subplots(figsize=(7, 4))
axis.plot(values, values, color="0.7", label="exact")
axis.plot(values, nearest, label="nearest even")
axis.plot(values, total / draws, ".", label=f"stochastic, mean of {draws}")
axis.set(xlabel="value, in units of the scale", ylabel="mean after rounding")
axis.legend()
figure.tight_layout()

# %%
# The bits come from a counter (Philox), so the same seed gives the same codes everywhere.

first, again = (x.quantize(spec, seed=7).codes for _ in range(2))
bool((np.asarray(first) == np.asarray(again)).all())
