"""
Pipeline schedules: read schedule tables, check them before a run, and plan their resources.

`tables`, `torch_tables`, `megatron`, `deepspeed`, `te_order` and `infer` read schedules; `tables`
also writes them. `ranks` checks a schedule without running the contract, and `check` runs the
contract on every action. A `transport` describes how the runtime carries messages. A `pairing`
decides which retained work (the operands that a dI leaves) a dW gets. `plan` counts resources.
`grid`, `timeline` and `trace` draw a schedule.

>>> from qeffect.schedule.check import check
>>> from qeffect.schedule.tables import read_fixture
>>> schedule = read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv")
>>> check(schedule).verdict
'accepted'
>>> refused = check(schedule, pairing="latest")
>>> refused.clause, refused.rank, refused.step, refused.action
('ownership.wrong-key', 1, 22, '1W2')

A schedule from any reader can be written in torch's format:

>>> from qeffect.schedule.tables import parse_table, write_table
>>> from qeffect.schedule.te_order import te_order
>>> table = write_table(te_order("1,1,-1,-1,-1.5,-1.5"))
>>> table
'0F0,0F1,0I0,0I1,0W0,0W1\\r\\n'
>>> parse_table(table).rows == te_order("1,1,-1,-1,-1.5,-1.5").rows
True
"""
