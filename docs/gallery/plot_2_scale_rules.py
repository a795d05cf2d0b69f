"""
The scale rule decides what saturates
=====================================

The scale of an MX block is a power of two, but the largest value of a block seldom is one over
six. The published rule (floor) lets values beyond 6 times the scale saturate; NVIDIA's (rceil)
takes the next power of two and gives up resolution instead.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

top = np.geomspace(2, 16, 400, dtype=np.float32)
blocks = np.zeros((400, 32), np.float32)
blocks[:, 0] = top
x = et.from_numpy(blocks)

figure, axis = plt.subplots(figsize=(7, 4))
for rule in ("floor", "even", "rceil"):
    largest = x.quantize(et.QuantSpec("mxfp4", scale_rule=rule)).dequantize().numpy()[:, 0]
    axis.plot(top, 100 * (largest / top - 1), label=rule)
axis.set(xscale="log", xlabel="largest value of the block", ylabel="its error, %")
axis.set_xticks([2, 3, 4, 6, 8, 12, 16], ["2", "3", "4", "6", "8", "12", "16"])
axis.axhline(0, color="0.7", linewidth=0.8)
axis.legend(title="scale rule")
figure.tight_layout()

# %%
# With floor, a quarter of the largest value can be lost, always downwards. In training that
# decides more than the format does: see the tables in the results.
