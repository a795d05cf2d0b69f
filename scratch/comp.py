import sys,re
sys.path.insert(0,'.')
from pathlib import Path
from extensor_cuda import jit
base=dict(UE4M3=0,BLOCK=32,WARPS=8,CHUNK=512,STAGES=3,TILES=1,PARTS=1,IN=1,OUT=1,COPY=0,PREFETCH=0,PDL=0,LOADS=0,DECODES=0,ACCS=1)
for extra in ({},{'TILES':2},{'COPY':1,'PREFETCH':1,'PDL':1,'CHUNK':1024},{'WARPS':16},{'ACCS':2}):
    s=jit.Source.read(Path('scratch/stream.cu'),{**base,**extra})
    code,log=jit.compile_cubin(s,'sm_90a')
    print(extra,re.search(r'Used (.*?) reg',log)[1],re.search(r'([0-9]*) bytes stack',log)[1])
    Path('/tmp/gpu_s_%d.cubin'%len(str(extra))).write_bytes(code)
