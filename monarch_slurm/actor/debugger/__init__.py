"""``breakpoint()`` in any process of a program, and the debugger that goes from rank to rank.

- `hook`, `rank_pdb`: in the process that stops
- `desk`: the program's list of stopped ranks; `shell`: the commands of a person; `ranks`: which ranks they mean
- `terminal`: the program's own terminal; `service`: other terminals, through its console
- `controller`: the same for programs; `own`: debuggers that are a program's own
"""
