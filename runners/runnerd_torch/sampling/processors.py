"""Changes logits before the choice: masks, penalties, logit bias, allowed and banned tokens.

All functions work in place on float32 logits ``[num_rows, vocab_size]`` and enqueue device work only: every shape is
known on the host. What depends on earlier tokens reads them from the token table on the device, where the latest
ones are even while the host still waits for them.
"""

from __future__ import annotations

import torch

from runnerd_torch.sampling.batch import AllowedTokens, BadWords, LogitBias, Penalties, SamplingBatch, TokenMasks


def process_logits(logits: torch.Tensor, batch: SamplingBatch, buffer: torch.Tensor, token_table: torch.Tensor) -> None:
    """Apply what ``batch`` asks, in the order of the SPI.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous; changed in place.
        batch: The step's rows.
        buffer: The batch's arrays on the device of the logits.
        token_table: [max_num_seqs, max_model_len] int64.
    """
    if batch.masks is not None:
        _apply_masks(logits, batch.masks, buffer)
    if batch.penalties is not None:
        _apply_penalties(logits, batch.penalties, buffer, token_table)
    if batch.logit_bias is not None:
        _apply_logit_bias(logits, batch.logit_bias, buffer)
    if batch.allowed is not None:
        _keep_allowed(logits, batch.allowed, buffer)
    if batch.banned is not None:
        logits.view(-1).index_fill_(0, batch.banned.of(buffer), -torch.inf)
    if batch.bad_words is not None:
        _ban_bad_words(logits, batch.bad_words, buffer, token_table)


def _apply_masks(logits: torch.Tensor, masks: TokenMasks, buffer: torch.Tensor) -> None:
    rows = masks.rows.of(buffer)
    banned = masks.allowed.of(buffer)[:, :, None].bitwise_and(masks.bits.of(buffer)) == 0
    banned = banned.view(len(banned), -1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(banned, -torch.inf))


def _apply_penalties(
    logits: torch.Tensor, penalties: Penalties, buffer: torch.Tensor, token_table: torch.Tensor
) -> None:
    rows = penalties.rows.of(buffer)
    history = token_table[:, : penalties.max_num_tokens].index_select(0, penalties.slots.of(buffer))
    positions = torch.arange(penalties.max_num_tokens, device=logits.device)
    written = positions < penalties.num_tokens.of(buffer)[:, None]
    # The table holds anything behind the last token: replace it by a token that the request has for sure.
    history = torch.where(written, history, history[:, :1])
    chosen = logits.index_select(0, rows)
    if penalties.repetition is not None:
        seen = torch.zeros_like(chosen, dtype=torch.bool).scatter_(1, history, True)
        factor = penalties.repetition.of(buffer)
        chosen = torch.where(seen, torch.where(chosen < 0, chosen * factor, chosen / factor), chosen)
    if penalties.presence is not None and penalties.frequency is not None:
        is_output = written & (positions >= penalties.num_prompt_tokens.of(buffer)[:, None])
        # Integer counts: atomic additions give the same sum in any order.
        counts = torch.zeros_like(chosen, dtype=torch.int32).scatter_add_(1, history, is_output.to(torch.int32))
        chosen = chosen - counts * penalties.frequency.of(buffer) - (counts > 0) * penalties.presence.of(buffer)
    logits.index_copy_(0, rows, chosen)


def _apply_logit_bias(logits: torch.Tensor, bias: LogitBias, buffer: torch.Tensor) -> None:
    logits.view(-1).index_add_(0, bias.places.of(buffer), bias.values.of(buffer))


def _keep_allowed(logits: torch.Tensor, allowed: AllowedTokens, buffer: torch.Tensor) -> None:
    rows = allowed.rows.of(buffer)
    chosen = logits.index_select(0, rows)
    banned = torch.ones_like(chosen, dtype=torch.bool)
    banned.view(-1).index_fill_(0, allowed.places.of(buffer), False)
    logits.index_copy_(0, rows, chosen.masked_fill_(banned, -torch.inf))


def _ban_bad_words(logits: torch.Tensor, words: BadWords, buffer: torch.Tensor, token_table: torch.Tensor) -> None:
    prefixes = words.prefixes.of(buffer)
    longest = prefixes.shape[1]
    offsets = torch.arange(-longest, 0, device=logits.device)
    # Positions before the first token belong to filled-up places, which match anything.
    positions = (words.num_tokens.of(buffer)[:, None] + offsets).clamp_(min=0)
    latest = token_table[words.slots.of(buffer)[:, None], positions]
    matches = ((latest == prefixes) | (prefixes < 0)).all(dim=1)
    # Adding, not writing: one word that matches and one that does not may name the same token.
    logits.view(-1).index_add_(0, words.places.of(buffer), torch.where(matches, -torch.inf, 0.0).to(logits.dtype))
