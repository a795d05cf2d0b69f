"""
What four, six and eight bits can say
=====================================

A block of 32 values shares one power-of-two scale; each value then rounds to the nearest point
of a small grid. Here is one block whose values rise evenly from 0 to 1.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

line = np.linspace(0, 1, 512, dtype=np.float32)
x = et.from_numpy(line[None])

figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2))
for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"):
    rounded = x.quantize(et.QuantSpec(name, tile=(1, 512))).dequantize().numpy()[0]
    top.plot(line, rounded, label=name)
    bottom.plot(line, rounded - line)
top.set_ylabel("rounded")
top.legend()
bottom.set(xlabel="value", ylabel="error")
bottom.axhline(0, color="0.7", linewidth=0.8)
figure.tight_layout()

# %%
# MXFP4 has seven positive values in a block: 0.5, 1, 1.5, 2, 3, 4 and 6 times its scale.

x.to_mxfp4(block_size=512).dequantize().numpy().max()
