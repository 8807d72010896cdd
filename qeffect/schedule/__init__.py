"""
Pipeline schedules: tables in, actions out, and what can be said about them before anything runs.

`tables`, `torch_tables`, `te_order` and `infer` read; `ranks` checks what needs no kernel (under a
`transport`, which says how the runtime carries messages), `check` drives the contract through every
action; `pairing`, `pools` and `plan` analyse; `grid`, `timeline`
and `trace` show; `random_schedules` and `faults` make schedules up.

>>> from qeffect.schedule.check import check
>>> from qeffect.schedule.tables import read_fixture
>>> schedule = read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv")
>>> check(schedule).verdict
'accepted'
>>> refused = check(schedule, pairing="latest")
>>> refused.clause, refused.rank, refused.step, refused.action
('ownership.wrong-key', 1, 22, '1W2')
"""
