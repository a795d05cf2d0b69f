import statistics, sys, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as with_
import ml_dtypes, numpy as np
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda import decode, jit
from tests.product_cases import exact
T0 = time.time()
SPEC = QuantSpec("mxfp4").replace(axis=1).resolve(2)
SHAPES = ((28672, 8192), (8192, 8192), (8192, 28672), (4096, 4096))
class Shape:
    def __init__(self, shape): self.spec, self.shape = SPEC, shape
def build(key):
    mode, rows, k = key
    chunk, ahead = mode
    decode._CHUNK, decode._AHEAD = chunk, ahead
    decode._few_source.cache_clear()
    return jit.cubin(decode.few_source(Shape((8192, k)), rows, "bfloat16", "bfloat16"), "sm_90a")
MODES = ((512, 2), (512, 3))
ROWS = (1, 2, 4, 8, 12, 16)
if __name__ == "__main__":
    with ProcessPoolExecutor(14) as pool: list(pool.map(build, [(m, r, 8192) for m in MODES for r in (1, 16)]))
    import cupy as cp, torch
    print("start", round(time.time() - T0, 1), flush=True)
    def measure(calls, rounds, n=6):
        times = {c: [] for c in calls}
        for turn in range(rounds + 1):
            for c, g in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(900000); a.record()
                for i in range(n): g(turn * n + i)
                b.record(); b.synchronize()
                if turn > 0: times[c].append(a.elapsed_time(b) / n * 1e3)
        return {c: statistics.median(t) for c, t in times.items()}
    rng, chosen = np.random.default_rng(0), decode.cut
    with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
      for n, k in SHAPES:
        turns = 8 if n == 4096 else 4 if n == k else 2
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        base = reference.quantize(rng.standard_normal((64, k)).astype(np.float32), SPEC)[0]
        w, idx = [], []
        for t in range(turns):
            order = rng.integers(0, 64, n); idx.append(order)
            w.append(with_(base, shape=(n, k), **{name: cp.asarray(part)[cp.asarray(order)] for name, part in base.parts.items()}))
        values = exact(base)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            view = cp.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)
            want = (x.double().cpu().numpy() @ values.T)[:, idx[0]]
            calls, err = {"torch": lambda i: torch.nn.functional.linear(x, dense[i % turns])}, {}
            for mode in MODES if rows in (1, 8, 16) else MODES[:1]:
                decode._CHUNK, decode._AHEAD = mode
                ways = sorted(decode.cuts(n, k, rows, 32), key=lambda way: way[0])[: 4 if mode == MODES[0] else 1]
                for cost, way in ways:
                    name = f"{mode} S{way.slices} P{way.parts} cost {cost:.1f}"
                    def call(i, way=way, mode=mode):
                        if (decode._CHUNK, decode._AHEAD) != mode: decode._few_source.cache_clear()
                        decode._CHUNK, decode._AHEAD = mode
                        decode.cut = lambda *shape: way
                        return decode.product(view, w[i % turns], "bfloat16", cp)
                    got = call(0).get().astype(np.float64)
                    e = np.linalg.norm(got - want) / np.linalg.norm(want)
                    err[name] = f"{e:.1e}" + (" WRONG" if not e < 3e-3 else "")
                    calls[name] = call
            decode._CHUNK, decode._AHEAD = MODES[0]; decode._few_source.cache_clear()
            def old(i):
                decode.cut = lambda *shape: None
                return decode.product(view, w[i % turns], "bfloat16", cp)
            calls["old"] = old
            t = measure(calls, 7)
            for name, us in t.items():
                print(f"M={rows:2d} {n}x{k} {name:30s} {us:7.2f} us {t['torch'] / us:5.2f}x {err.get(name, '')}", flush=True)
        del dense, w
    print("end", round(time.time() - T0, 1))
