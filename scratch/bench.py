"""Variants of the decode product side by side."""
import ctypes, re, statistics, sys, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as with_
from pathlib import Path
import ml_dtypes, numpy as np
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda import decode as A, jit
from tests.product_cases import exact
T0 = time.time()
FULL, SMS = 227 * 1024 - 1024, 132
BASE = dict(UE4M3=0, BLOCK=32, WARPS=8, CHUNK=512, STAGES=2, TILES=1, PARTS=1, IN=1, OUT=1, COPY=0, PREFETCH=0, PDL=1, LOADS=0, DECODES=0, ACCS=1, NOSUM=0, R=1, EARLY=0, BATCH=8, GRAIN=16)
OTHER = {"g": "slices", "y": "pad", "q": "parts", "z": "resident", "k": "carve"}
def v(text):
    names = {"w": "WARPS", "c": "CHUNK", "s": "STAGES", "b": "BATCH", "p": "PREFETCH", "d": "PDL", "l": "LOADS", "x": "DECODES", "a": "ACCS", "n": "NOSUM", "r": "R", "e": "EARLY"}
    m = {names[p[0]]: int(p[1:]) for p in text.split() if p[0] in names}
    if m.get("CHUNK") == 256: m["GRAIN"] = 8
    return m
def given(text): return {OTHER[p[0]]: int(p[1:]) for p in text.split() if p[0] in OTHER}
V = ["s2", "s2 d0", "s2 e1", "s2 e2", "s2 b4", "s2 b4 a2", "s2 b4 e1", "s2 y120", "s3 b4", "s3 e3", "s2 a2", "s2 w16 b4", "s2 w16 b4 a2", "c256 s3 b4", "c256 s4 b4", "c256 s4 b4 a2", "c256 s5 b4", "c256 s6 b4", "c256 s4 w16 b4", "c256 s3 w16 b4", "c256 s2 w16 b4", "c1024 s2 b4",
     "r2 c256 s2 b4", "r2 c256 s3 b4", "r2 c256 s3 w4 b4", "r2 c256 s2 w7 b4", "r2 c256 s2 w12 b4", "s2 w7 b4", "c256 s4 w7 b4", "c256 s2 w14 b4", "c256 s3 w14 b4",
     "s2 n1", "s2 l1", "s2 x1", "s2 b4 n1", "s2 b4 l1", "s2 b4 x1", "s2 e2 l1", "c256 s4 b4 n1", "c256 s4 b4 l1", "c256 s4 b4 x1", "c256 s4 b4 a2 x1", "r2 c256 s2 b4 n1", "r2 c256 s2 b4 x1", "s2 w16 b4 x1",
     "s2 b4 k1", "s2 k1", "s2 b4 z2", "c256 s3 b4 z2", "c256 s4 b4 z2", "s2 w7 b4 z2", "s2 b4 g2", "s2 b4 g4", "s2 b4 g8", "c256 s4 b4 g2", "c256 s4 b4 g4", "c256 s4 b4 g8", "r2 c256 s2 b4 g2", "r2 c256 s2 b4 g4", "r2 c256 s2 b4 g8", "r2 c256 s2 w4 b4 g2", "r2 c256 s3 w4 b4 g4"]
SHAPES = ((28672, 8192), (8192, 8192), (8192, 28672))
SPEC = QuantSpec("mxfp4").replace(axis=1).resolve(2)
class Shape:
    def __init__(self, shape): self.spec, self.shape = SPEC, shape
def plan(text, n, k, rows):
    m = {**BASE, **v(text), "TILES": 1 if rows <= 8 else 2}
    tall, want = 16 * m["R"], given(text)
    each = want.get("resident", 1)
    SMS, FULL = 132 * each, (228 * 1024 // each - 1024) - 1024
    stage = tall * (m["CHUNK"] // 2 + 32 + m["CHUNK"] // m["BLOCK"])
    ring, tiles, best = m["WARPS"] * m["STAGES"] * stage, -(-n // tall), None
    for slices in range(1, 65):
      for parts in (1, 2, 4, 8, 16):
        if m["WARPS"] % parts or slices > 1 < parts or want.get("slices", slices) != slices or want.get("parts", parts) != parts: continue
        stretch = -(-k // slices // m["CHUNK"]) * m["CHUNK"]
        of_part = -(-stretch // m["CHUNK"] // parts) * m["CHUNK"]
        mine = -(-tiles // (SMS // slices))
        shared = ring + rows * (stretch * 2 + 64) + (mine * tall * rows * parts * 4 if slices == 1 else 0)
        if (slices - 1) * stretch >= k or shared > FULL or slices > SMS: continue
        cost = -(-mine // (m["WARPS"] // parts)) * of_part + (400 + 30 * rows) * (slices > 1)
        if best is None or cost * 1.01 < best[0]: best = cost, slices, stretch, max(shared, want.get("pad", 0) * 1024), parts
    if best is None: return None
    cost, slices, stretch, shared, parts = best
    ideal = tiles * k / SMS / m["WARPS"]
    return jit.Source.read(Path("scratch/stream.cu"), m), shared, slices, stretch, SMS // slices, 32 * m["WARPS"], ideal / cost, parts, want
def build(source):
    try:
        return jit.compile_cubin(source, "sm_90a")
    except Exception as e:
        return repr(e)[:3000]
ROWS = (1, 4, 8, 16)
def wanted():
    for n, k in SHAPES:
        for rows in ROWS:
            for t in V:
                if rows > 16: continue
                if not (rows == 1 and "g" in t): yield n, k, rows, t
if __name__ == "__main__":
    plans = {key: p for key in wanted() if (p := plan(key[3], *key[:3]))}
    sources = list({p[0]: 0 for p in plans.values()})
    mains = {rows: A.decode_source(Shape((8192, 8192)), rows, "bfloat16", "bfloat16") for rows in ROWS}
    with ProcessPoolExecutor(int(__import__("os").environ.get("POOL", "16"))) as pool: built = dict(zip(sources + list(mains.values()), pool.map(build, sources + list(mains.values()))))
    for (n, k, rows, t), p in plans.items():
        got = built[p[0]]
        if isinstance(got, str): print("DOES NOT COMPILE", t, got)
        elif (n, k) == SHAPES[0] and rows in (1, 16): print(f"rows {rows} {t}: regs {re.search(r'Used (.*?) reg', got[1])[1]} stack {re.search(r'([0-9]*) bytes stack', got[1])[1]} shared {p[1]} slices {p[2]} x {p[3]} groups {p[4]} parts {p[7]} balance {p[6]:.2f}")
    print("compiled", len(sources), round(time.time() - T0, 1), flush=True)
    if "--compile" in sys.argv: sys.exit()
    import cupy as cp, torch
    from cuda.bindings import driver
    print(torch.cuda.get_device_name(), cp.__version__, round(time.time() - T0, 1), flush=True)
    functions, kept = {}, []
    for s, got in built.items():
        if isinstance(got, str): continue
        module = cp.cuda.function.Module(); module.load(got[0]); functions[s] = (module, module.get_function("decode_product"))
    done = cp.zeros(4096, cp.uint32); partial = cp.empty(64 * 32 * 32768, cp.float32)
    stream = torch.cuda.current_stream().cuda_stream
    i32, i64 = np.int32, np.int64
    null = np.uint64(0)
    def launcher(f, grid, threads, shared, arguments, early, carve=False):
        if carve:
            module = cp.cuda.function.Module(); module.load(carve); f = module.get_function("decode_product"); kept.append(module)
            cp.cuda.driver.funcSetAttribute(f.ptr, 9, 100)
        if shared: cp.cuda.driver.funcSetAttribute(f.ptr, 8, 232448 - 2048)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = int(early)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = shared, stream, [attribute], 1
        packed = []
        for a in arguments:
            boxes = [ctypes.c_uint64(b.data.ptr) if isinstance(b, cp.ndarray) else ctypes.c_uint64(int(b)) if b.dtype in (np.uint64, np.int64) else ctypes.c_int32(int(b)) for b in a]
            packed.append((boxes, (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes))))
        def call(i):
            r = driver.cuLaunchKernelEx(config, f.ptr, ctypes.addressof(packed[i % len(packed)][1]), 0)
            assert int(r[0]) == 0, r
        call.keep = arguments
        return call
    def measure(calls, rounds, n=8):
        times = {c: [] for c in calls}
        for turn in range(rounds + 1):
            for c, g in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(300000); a.record()
                for i in range(n): g(turn * n + i)
                b.record(); b.synchronize()
                if turn > 0: times[c].append(a.elapsed_time(b) / n * 1e3)
        return {c: statistics.median(t) for c, t in times.items()}
    big = torch.empty(1 << 26, dtype=torch.bfloat16, device="cuda")
    rng = np.random.default_rng(0)
    with cp.cuda.ExternalStream(stream):
      for n, k in SHAPES:
        turns = 5 if n == k else 3
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        base = reference.quantize(rng.standard_normal((64, k)).astype(np.float32), SPEC)[0]
        w, idx = [], []
        for t in range(turns):
            order = rng.integers(0, 64, n); idx.append(order)
            w.append(with_(base, shape=(n, k), **{name: cp.asarray(part)[cp.asarray(order)] if part.ndim == 2 else cp.asarray(part) for name, part in base.parts.items()}))
        values = exact(base)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            view = cp.from_dlpack(x.view(torch.int16))
            want = (x.double().cpu().numpy() @ values.T)[:, idx[0]]
            out = cp.zeros((rows, n), cp.uint16)
            calls = {"torch": lambda i: torch.nn.functional.linear(x, dense[i % 2])}
            if rows == 1: calls["clone"] = lambda i: big.clone()
            err, size = {}, {"torch": 2 * n * k, "clone": 4 * (1 << 26)}
            splits, stretch = A.stretches(n, k, 128)
            calls["main"] = launcher(functions[mains[rows]][1], n // 64 * splits, 128, 0,
                [(view, q.codes, q.scales, null, null, partial, done, out, i32(rows), i32(n), i32(k), i64(k // 2), i64(k // 32), i32(splits), i32(stretch)) for q in w], False)
            for (n_, k_, rows_, t) in plans:
                if (n_, k_, rows_) != (n, k, rows): continue
                source, shared, slices, stretch, groups, threads, balance, parts, want_ = plans[n_, k_, rows_, t]
                if source not in functions: continue
                calls[t or "base"] = launcher(functions[source][1], groups * slices, threads, shared,
                    [(view, q.codes, q.scales, null, null, partial, done, out, i32(rows), i32(n), i32(k), i32(k // 2), i32(k // 32), i32(0), i32(slices), i32(stretch), i32(parts.bit_length() - 1)) for q in w], "d0" not in t, built[source][0] if "carve" in want_ or "resident" in want_ else None)
            for name in list(calls):
                if name in ("torch", "clone"): continue
                try:
                    out.fill(0x7FC0); calls[name](0); cp.cuda.Device().synchronize()
                except Exception as e:
                    print(name, "FAILED", repr(e)[:300], flush=True)
                    if "AssertionError" in repr(e): del calls[name]; continue
                    raise
                got = out.get().view(ml_dtypes.bfloat16).astype(np.float64)
                e = np.linalg.norm(got - want) / np.linalg.norm(want)
                err[name] = f"{e:.1e}" + ("" if e < 3e-3 or any(c in name for c in "lxn") else " WRONG")
                size[name] = w[0].nbytes
            t = measure(calls, 7)
            for name, us in t.items():
                print(f"M={rows:2d} {n}x{k} {name:22s} {us:7.2f} us {size[name] / us / 1e6:5.2f} TB/s {t['torch'] / us:5.2f}x {err.get(name, '')}", flush=True)
        del dense, w
    print("end", round(time.time() - T0, 1))
