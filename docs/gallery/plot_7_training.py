"""
A small network in FP4
======================

The same network, data and seeds under four recipes. Unscaled casts to FP4 (`mxfp4_one`) lose the
small gradients; block scales keep them.
"""

import matplotlib.pyplot as plt
import numpy as np

import extensor as et
from extensor.training.data.digits import read_digits

pixels, labels = read_digits()
images = (pixels.reshape(-1, 64) / 16).astype(np.float32)


def train(name, steps=150):
    """Losses of a three-layer network on the digits."""
    rng = np.random.default_rng(0)
    widths = ((64, 128), (128, 128), (128, 10))
    layers = [layer for w in widths for layer in (et.nn.Linear(*w, rng=rng), et.nn.ReLU())][:-1]
    model = et.nn.Sequential(*layers)
    et.nn.apply_recipe(model, et.RECIPES[name], seed=0)
    optimizer = et.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        batch = rng.integers(0, len(images), 64)
        scores = model(et.from_numpy(images[batch]))
        loss = et.cross_entropy(scores, et.from_numpy(labels[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.convolve(losses, np.ones(10) / 10, mode="valid")


figure, axis = plt.subplots(figsize=(7, 4))
for name in ("fp32", "mxfp8_nvidia", "mxfp4", "mxfp4_one"):
    axis.plot(train(name), label=name)
axis.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
axis.legend()
figure.tight_layout()
