import statistics, time
import ml_dtypes, numpy as np
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as with_
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda import decode, jit
from tests.product_cases import exact
SPECS = {n: QuantSpec(n).replace(axis=1).resolve(2) for n in ("mxfp4", "nvfp4")}
class Shape:
    def __init__(self, name): self.spec, self.shape = SPECS[name], (8192, 8192)
def build(key): return jit.cubin(decode.few_source(Shape(key[0]), key[1], "bfloat16", "bfloat16"), "sm_90a")
if __name__ == "__main__":
    with ProcessPoolExecutor(8) as pool: list(pool.map(build, [(m, r) for m in SPECS for r in (1, 16)]))
    import cupy as cp, torch
    def measure(calls, rounds, n=4):
        times = {c: [] for c in calls}
        for turn in range(rounds + 1):
            for c, g in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(2_000_000); a.record()
                s = time.perf_counter()
                for i in range(n): g(turn * n + i)
                host[c] = (time.perf_counter() - s) / n * 1e6
                b.record(); b.synchronize()
                if turn > 0: times[c].append(a.elapsed_time(b) / n * 1e3)
        return {c: statistics.median(t) for c, t in times.items()}
    rng, host = np.random.default_rng(0), {}
    with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
      for n, k in ((28672, 8192), (8192, 8192), (8192, 28672)):
        turns = 4 if n == k else 2
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        held = {}
        for name, spec in SPECS.items():
            base = reference.quantize(rng.standard_normal((64, k)).astype(np.float32), spec)[0]
            order = [rng.integers(0, 64, n) for _ in range(turns)]
            held[name] = exact(base), order, [with_(base, shape=(n, k), **{part: cp.asarray(a)[cp.asarray(o)] if a.ndim == 2 else cp.asarray(a) for part, a in base.parts.items()}) for o in order]
        for rows in (1, 4, 8, 16):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            view = cp.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)
            calls, err = {"torch": lambda i: torch.nn.functional.linear(x, dense[i % turns])}, {}
            for name, (values, order, w) in held.items():
                ways = sorted(decode.cuts(n, k, rows, 32 if name == "mxfp4" else 16), key=lambda way: way[0])
                for cost, way in ways[: 3 if name == "mxfp4" else 1]:
                    def call(i, way=way, w=w):
                        decode.cut = lambda *shape: way
                        return decode.product(view, w[i % turns], "bfloat16", cp)
                    title = f"{name} S{way.slices} P{way.parts}"
                    want = (x.double().cpu().numpy() @ values.T)[:, order[0]]
                    e = np.linalg.norm(call(0).get().astype(np.float64) - want) / np.linalg.norm(want)
                    calls[title], err[title] = call, f"{e:.1e}" + (" WRONG" if not e < 3e-3 else "")
            t = measure(calls, 7)
            for name, us in t.items(): print(f"M={rows:2d} {n}x{k} {name:16s} {us:7.2f} us {t['torch'] / us:5.2f}x host {host[name]:.0f} us {err.get(name, '')}", flush=True)
        del dense, held
