import sys,cProfile,pstats,pathlib,pickle,time
sys.path.insert(0,'/work/main')
def go(model_paths,out):
    t0=time.process_time()
    from tests.engine import ranks_engine as R
    t1=time.process_time()
    pr=cProfile.Profile(); pr.enable()
    with R.layout(2,1) as parallel:
        for m,p in model_paths.items():
            R.examine(R.engine_of(parallel,p), out/m)
    pr.disable()
    import io; s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats('cumulative').print_stats(45)
    return t1-t0, time.process_time()-t1, s.getvalue()
if __name__=='__main__':
    from spark_megatron import runtime; runtime.prepare_environment()
    import os; os.environ['PYTHONPATH']='/tmp/mk'
    from tests import distributed, tiny_models
    import tempfile; root=pathlib.Path(tempfile.mkdtemp())
    paths={}
    for n in ('llama','qwen2','qwen3'):
        tiny_models.save(n, root/n, 0); paths[n]=root/n
    distributed.ROOT=pathlib.Path('/work/main')
    sys.path.insert(0,'/tmp/mk')
    import shutil
    shutil.copy('/tmp/mk/prof.py','/work/main/tests/_prof.py')
    r=distributed.run(2,'tests._prof:go',root/'job',model_paths=paths,out=root/'out')
    print(r[0][0],r[0][1]); print(r[0][2][:6000])
