"""
The loops of the stand-in: Megatron-core's names, in Megatron-core's order.

The loops run the rows of `qeffect.schedule.megatron`. As Megatron-core's loops do, they look up
`forward_step` and `backward_step` in their own module.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from qeffect.schedule.megatron import megatron_schedule
from tests.megatron.stand_in_parts import P2PCommunicator


def get_model_config(model: Any) -> Any:
    return model.config


def get_forward_backward_func() -> Any:
    return forward_backward_no_pipelining


def forward_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int = 1,
    *,
    is_first_microbatch: bool = False,
    current_microbatch: int = 0,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> Any:
    if is_first_microbatch:
        model.set_is_first_microbatch()
    for layer in model.module.decoder.layers:
        layer.current_microbatch = current_microbatch
    listed = isinstance(input_tensor, list)
    model.module.given = input_tensor[0] if listed else input_tensor
    output, loss = forward_step_func(data_iterator, model)
    if is_last_stage:
        output, *_, found = loss(output)
        output /= num_microbatches
        forward_data_store.append(found)
    return ([output] if listed else output), torch.tensor(0)


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
) -> Any:
    one, given, gradient = (
        each[0] if isinstance(each, list) else each
        for each in (output_tensor, input_tensor, output_tensor_grad)
    )
    if given is not None:
        given.retain_grad()
    torch.autograd.backward(one, grad_tensors=gradient)
    found = None if given is None else given.grad
    return [found] if isinstance(input_tensor, list) else found


def forward_backward_no_pipelining(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **_: Any,
) -> list[Any]:
    config, found = get_model_config(model), []
    for microbatch in range(num_microbatches):
        last = microbatch == num_microbatches - 1
        with nullcontext() if last or config.no_sync_func is None else config.no_sync_func():
            output, _ = forward_step(
                forward_step_func,
                data_iterator,
                model,
                num_microbatches,
                None,
                found,
                config,
                is_first_microbatch=microbatch == 0,
                current_microbatch=microbatch,
            )
            if not forward_only:
                backward_step(None, output, None, config)
    if not forward_only:
        config.finalize_model_grads_func([model])
    return found


def _pipelined(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **_: Any,
) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(model, list) else [data_iterator]
    config, found = get_model_config(chunks[0]), []
    communicator = P2PCommunicator(config.group, config)
    rank, ranks = config.group.rank(), config.group.size()
    table = megatron_schedule(
        pp=ranks,
        vpp=len(chunks),
        microbatches=num_microbatches,
        messages="batched" if config.batch_p2p_comm else "overlapped",
    )
    kept: dict[tuple[str, int, int], Any] = {}
    for action in table.rows[rank]:
        assert action is not None
        kind, work = action.kind.value, (action.stage, action.microbatch)
        v = (action.stage - rank) // ranks
        if kind == "F":
            output, _ = forward_step(
                forward_step_func,
                iterators[v],
                chunks[v],
                num_microbatches,
                kept.get(("RECV_F", *work)),
                found,
                config,
                is_first_microbatch=work[1] == 0,
                current_microbatch=work[1],
                vp_stage=v if len(chunks) > 1 else None,
                is_last_stage=action.stage == ranks * len(chunks) - 1,
            )
            kept["F", *work] = output
        elif forward_only and kind != "RECV_F":
            continue
        elif kind == "B":
            kept["B", *work] = backward_step(
                kept.get(("RECV_F", *work)),
                kept.pop(("F", *work)),
                kept.get(("RECV_B", *work)),
                config,
            )
        else:
            given, gradient, _ = communicator._communicate(
                tensor_send_next=kept["F", *work] if kind == "SEND_F" else None,
                tensor_send_prev=kept["B", *work] if kind == "SEND_B" else None,
                recv_prev=kind == "RECV_F",
                recv_next=kind == "RECV_B",
                tensor_shape=config.shape,
            )
            kept[kind, *work] = given if kind == "RECV_F" else gradient
    if not forward_only:
        config.finalize_model_grads_func(chunks)
    return found


def forward_backward_pipelining_without_interleaving(**given: Any) -> list[Any]:
    return _pipelined(**given)


def forward_backward_pipelining_with_interleaving(**given: Any) -> list[Any]:
    return _pipelined(**given)
