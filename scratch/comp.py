import sys,re
sys.path.insert(0,'.')
from pathlib import Path
from extensor_cuda import jit
from scratch import bench
for i,(t,rows) in enumerate((("s2",1),("s2 e1",1),("s2",16),("s2 b4",1))):
    p=bench.plan(t,28672,8192,rows)
    code,log=jit.compile_cubin(p[0],'sm_90a')
    Path('/tmp/dec_%d.cubin'%i).write_bytes(code)
