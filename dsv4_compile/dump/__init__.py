"""`dump_dir`: what every compilation of a process did, as a folder of ordinary files.

    DIR/20260301-140501-4711/            one folder for each process: time of its first graph, and its number
        index.json                       schema, versions, and for each graph its state, files, operators and times
        report_0.json                    the report of each torch.compile(...)
        graph_0_0/
            dynamo.py, dynamo.json       the graph that Dynamo handed over
            before.py, before.json       the functional graph before our passes
            mhc.py, mhc.json             behind the pass of that name, and so on
            inner_1.before.py, ...       the same of a graph within the graph, such as a branch of `cond`
            inductor.py                  the code that Inductor wrote
            bytecode.py                  Dynamo's bytecode, decompiled by depyf where that is installed
        pieces/
            KEY.py, KEY.inductor.py      a distinct piece of graphs that were cut, and Inductor's code for it

`writer` fills it while a graph is compiled. `reader` takes it apart again: it needs no torch, and neither executes nor
unpickles anything. `schema` is what the two agree on, `nodes` makes records of FX nodes, `inputs` finds what the user
calls the inputs, `listing` makes text of them.
"""
