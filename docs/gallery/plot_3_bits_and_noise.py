"""
Bits against noise
==================

Signal to quantization noise of a million normal values under every blocked format, against the
bits that a value really takes, its share of the scales included.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et

x = et.ExTensor.randn((1024, 1024), seed=0)
power = float((x.numpy().astype(np.float64) ** 2).sum())

figure, axis = plt.subplots(figsize=(7, 4.5))
for number, name in enumerate(et.FORMATS):
    if name == "outlier":  # rows with their largest values beside the codes: another kind
        continue
    q = x.quantize(et.QuantSpec(name))
    noise = float(((x.numpy() - q.dequantize().numpy()).astype(np.float64) ** 2).sum())
    bits = 8 * q.nbytes / x.numpy().size
    decibels = 10 * np.log10(power / noise)
    axis.plot(bits, decibels, "o", color=f"C{number % 10}")
    right = name.startswith("mxfp6") or name.startswith("mxfp8") or name == "mxint8"
    place = (7 if right else -7, 2 if name == "nvfp4_fp8exact" else -4)
    side = "left" if right else "right"
    axis.annotate(name, (bits, decibels), place, textcoords="offset points", ha=side, fontsize=8)
axis.set(xlabel="bits per value", ylabel="signal to noise, dB", xlim=(3.2, 9.6))
axis.grid(alpha=0.3)
figure.tight_layout()
