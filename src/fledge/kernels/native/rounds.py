"""The bookkeeping at both ends of a round: `round_rows` tells what it is."""

from collections.abc import Sequence

from torch import Tensor

from fledge.kernels.native.library import library


def open_round_native(
    rows: Tensor, state: Sequence[Tensor], written: Sequence[Tensor], *, width: int, block_size: int
) -> None:
    """Fill `written` (tokens, positions, slots, tables, context, drafted) from the state of `rows`.

    The state is last_token, drafts, length, draft_count and block_tables.
    """
    loaded = library()
    assert loaded is not None
    last_token, drafts, length, draft_count, block_tables = state
    loaded.fledge_open_round(
        rows.data_ptr(),
        rows.shape[0],
        width,
        block_size,
        last_token.data_ptr(),
        drafts.data_ptr(),
        drafts.stride(0),
        length.data_ptr(),
        draft_count.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        *[tensor.data_ptr() for tensor in written],
    )


def settle_round_native(
    rows: Tensor,
    read: Sequence[Tensor],
    state: Sequence[Tensor],
    written: Sequence[Tensor],
    *,
    depth: int,
    block_size: int,
) -> None:
    """Update the state (last_token, length, draft_count) and fill `written` (tokens, last_rows, positions, slots).

    What is read is context, tables, emitted tokens [batch, width], accepted, draft_until and draft_limit.
    """
    loaded = library()
    assert loaded is not None
    context, tables, emitted, accepted, draft_until, draft_limit = read
    loaded.fledge_settle_round(
        rows.data_ptr(),
        *emitted.shape,
        block_size,
        depth,
        context.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        emitted.data_ptr(),
        accepted.data_ptr(),
        draft_until.data_ptr(),
        draft_limit.data_ptr(),
        *[tensor.data_ptr() for tensor in (*state, *written)],
    )
