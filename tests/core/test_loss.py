"""The unrolled loss: equal to speculators' where the conventions agree, and honest about misses."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from speculators_core.data.hidden_states import States
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.training import attention, loss
from speculators_core.training.attention import Queries, Span, UnrolledAttention
from speculators_core.training.divergence import kl
from speculators_core.training.loss import (
    TargetHead,
    Targets,
    Unrolled,
    Unroller,
    head_loss,
    unroll,
)
from speculators_core.training.meter import Meter, walk
from speculators_core.training.packing import Document, Packed, batches, pack
from tests import tiny

H, V, DV = tiny.HIDDEN, tiny.VOCAB, tiny.DRAFT_VOCAB
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def a_draft(seed: int = 0, **switches: object) -> Eagle3Draft:
    torch.manual_seed(seed)
    draft = Eagle3Draft(tiny.draft_config("v", **switches))
    kept = torch.zeros(V, dtype=torch.bool)
    kept[:: V // DV] = True
    draft.set_vocab_map(kept)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return draft


def a_head(seed: int = 1) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    norm = torch.nn.RMSNorm(H, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(H, generator=generator))
    head = 0.3 * torch.randn(V, H, generator=generator)
    kept = torch.zeros(V, dtype=torch.bool)
    kept[:: V // DV] = True
    return TargetHead(norm, head, kept)


def a_document(mask: str, seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return Document(
        ids=torch.randint(0, V, (length,), generator=generator),
        mask=torch.tensor([c == "x" for c in mask]),
        states=States(
            aux=torch.randn(length, 3 * H, generator=generator),
            final=torch.randn(length, H, generator=generator),
            best=torch.randint(0, V, (length,), generator=generator).to(torch.int32),
        ),
    )


def run(draft: Eagle3Draft, batch: Packed, steps: int = 3, decay: float = 1.0) -> Unrolled:
    return unroll(draft, batch, a_head().targets(batch), steps=steps, decay=decay)


class _SlowCache:
    """An `Attend` of one chain: all keys so far, concatenated."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.kept:
            old_key, old_value = self.kept[layer]
            key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        self.kept[layer] = (key, value)
        return F.scaled_dot_product_attention(
            q, key, value, is_causal=q.shape[2] > 1, enable_gqa=True
        )


def dense_loss(draft: Eagle3Draft, document: Document, steps: int) -> Tensor:
    """The same loss the slow way: one chain at a time, every key spelled out."""
    head, ids, n = a_head(), document.ids, len(document.ids)
    hidden0 = draft.combine(document.states.aux[None])
    target = torch.log_softmax(head.final_norm(document.states.final) @ head.rows.T, -1)
    sums, counts = [torch.zeros(()) for _ in range(steps)], [0] * steps
    for t in range(n - 2):
        if not document.mask[t + 1]:
            continue
        hidden: Tensor | None = None
        cache = _SlowCache()
        for k in range(steps):
            if t + 2 + k >= n or not document.mask[t + 1 : t + 3 + k].all():
                break
            if hidden is None:
                tokens, places = ids[1 : t + 2][None], torch.arange(t + 1)[None]
                normed, hidden = draft.step(tokens, hidden0[:, : t + 1], places, cache)
            else:
                place = torch.tensor([[t + k]])
                normed, hidden = draft.step(ids[t + 1 + k][None, None], hidden, place, cache)
            hidden = hidden[:, -1:]
            log_q = torch.log_softmax(draft.logits(normed[0, -1]), -1)
            log_p = target[t + 1 + k]
            sums[k] = sums[k] + (log_p.exp() * (log_p - log_q)).sum()
            counts[k] += 1
    return sum((s / max(c, 1) for s, c in zip(sums, counts, strict=True)), torch.zeros(()))


def gradients(draft: Eagle3Draft, loss: Tensor) -> dict[str, Tensor]:
    draft.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, grad in left.items():
        torch.testing.assert_close(grad, right[name], atol=tolerance, rtol=1e-3, msg=name)


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_attention_equals_one_chain_at_a_time(layers: int) -> None:
    document = a_document("....xxxxxx..xxx.", seed=3)
    torch.manual_seed(0)
    draft = a_draft(layers=layers)
    batch = pack([document])
    ours = run(draft, batch).loss
    slow = dense_loss(draft, document, 3)
    torch.testing.assert_close(ours, slow, atol=1e-5, rtol=1e-5)
    assert_same(gradients(draft, ours), gradients(draft, slow), 1e-4)


def test_documents_of_a_row_never_see_each_other() -> None:
    draft = a_draft()
    first, second = a_document("..xxxxx", 4), a_document(".xxxx.", 5)
    alone = [run(draft, pack([d])) for d in (first, second)]
    both = run(draft, pack([first, second]))
    sums = alone[0].step_losses + alone[1].step_losses
    torch.testing.assert_close(both.step_losses, sums, atol=1e-5, rtol=1e-5)
    other = run(draft, pack([a_document(".xxxx.", 99), second]))
    assert torch.equal(other.accepted[-3:], both.accepted[-3:])


def test_a_leaky_mask_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: what the second chat's steps depend on the first for is nothing; with a mask that
    joins the chats it is a lot, so this measure can see a leak in every step."""
    draft, second = a_draft(), a_document(".xxxxx.", 5)

    def leaked() -> Tensor:
        """[K] how far the second chat's losses move when the first chat is another."""
        sums = []
        for seed in (4, 99):
            first = a_document("..xxxxx", seed)
            both, alone = (run(draft, pack(chats)) for chats in ([first, second], [first]))
            sums.append(both.step_losses - alone.step_losses)
        return (sums[0] - sums[1]).abs()

    assert leaked().max() < 1e-5

    def joined(packed: Packed, counts: list[int], sees: Tensor) -> Queries:
        last = sum(counts)
        ends = torch.tensor(packed.lengths).cumsum(0) - torch.tensor(packed.lengths)
        shift = ends.repeat_interleave(torch.tensor(counts))
        return Queries((Span(slice(0, last), slice(0, sum(packed.lengths))),), sees + shift)

    monkeypatch.setattr(Packed, "_queries", joined)
    draft_sees_both = run(draft, pack([a_document("..xxxxx", 4), second])).step_losses
    monkeypatch.undo()
    apart = run(draft, pack([a_document("..xxxxx", 4), second])).step_losses
    assert ((draft_sees_both - apart).abs() > 1e-3).all()


def unpredictable(seed: int) -> Packed:
    """Eight chats of random tokens, whose verifier always knows the next one."""
    generator, head = torch.Generator().manual_seed(seed), a_head()
    documents = []
    for _ in range(8):
        ids = head.ids[torch.randint(0, 16, (24,), generator=generator)]
        following = torch.roll(ids, -1)
        final = 6 * head.rows[head.draft_id[following]]
        states = States(torch.zeros(24, 3 * H), final, following.to(torch.int32))
        documents.append(Document(ids, torch.ones(24, dtype=torch.bool), states))
    return pack(documents)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_mask_that_shows_the_next_token_would_raise_the_score(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """C11: of random tokens a draft learns nothing, unless its mask is leaky (the counter-example,
    one key too many), which then shows as acceptance that is too good."""
    honest = Packed.asking

    def asking(packed: Packed, live: Tensor) -> Queries:
        seen = honest(packed, live)
        return Queries(seen.spans, (seen.sees + ahead).clamp(max=24))

    monkeypatch.setattr(Packed, "asking", asking)
    draft, head = a_draft(), a_head()
    optimizer = torch.optim.AdamW([p for _, p in draft.trainable()], lr=3e-3)
    for seed in range(130):
        batch = unpredictable(seed)
        result = unroll(draft, batch, head.targets(batch), steps=1)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    score = float(result.accepted.float().mean())
    assert score > 0.5 if ahead else score < 0.2


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were there at once, of those made while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._made, made)
        return made

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def test_a_long_chat_among_short_ones_takes_no_more_memory_than_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B13: rows keep the budget, nothing is padded to the longest, no table of a chat's tokens by
    its tokens or of all tokens by the vocabulary is ever there."""
    monkeypatch.setattr(attention, "CHUNK", 32)
    monkeypatch.setattr(loss, "ROWS", 32)
    budget, lengths = 1024, [1024] + [20] * 100
    rows = batches(lengths, budget, range(len(lengths)))
    assert all(sum(lengths[d] for d in row) <= budget for row in rows)
    draft, head, peaks = a_draft(), a_head(), []
    for row in (rows[0], rows[1]):
        batch = pack([a_document(".." + "x" * (lengths[d] - 2), d) for d in row])
        targets = head.targets(batch)
        with Peak() as peak:
            unroll(draft, batch, targets, steps=3).loss.backward()
        peaks.append(peak.most / len(batch.ids))
    long, short = peaks
    assert long < 1.5 * short, peaks


@pytest.mark.parametrize("layers", [1, 2])
def test_computing_steps_again_changes_nothing(layers: int) -> None:
    """C15: each step still sees the keys and states of those before it."""
    draft = a_draft(layers=layers)
    batch = pack([a_document("..xxxxxxx..xxx", 21), a_document(".xxxx.", 22)])
    targets = a_head().targets(batch)
    kept, again = (
        Unroller(draft, 4, again=again).unroll(batch, targets) for again in (False, True)
    )
    torch.testing.assert_close(again.loss, kept.loss, atol=1e-6, rtol=1e-6)
    assert_same(gradients(draft, again.loss), gradients(draft, kept.loss), 1e-6)


def test_rows_of_a_step_add_up_to_one_larger_row() -> None:
    draft = a_draft()
    chats = [a_document("..xxxxxxx", 31), a_document(".xxxx.", 32), a_document("...xxx", 33)]
    whole = run(draft, pack(chats), decay=0.8)
    expected = gradients(draft, whole.loss)
    unroller = Unroller(draft, 3, 0.8)
    parts = [
        unroller.unroll(batch, a_head().targets(batch), whole.live)
        for batch in (pack(chats[:1]), pack(chats[1:]))
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, atol=1e-5, rtol=1e-5)
    assert_same(gradients(draft, parts[0].loss + parts[1].loss), expected, 1e-5)


def test_products_in_bfloat16_give_nearly_the_same_loss_and_gradients() -> None:
    draft, batch = a_draft(), pack([a_document("..xxxxxxxxxxxx", 41)])
    exact = run(draft, batch)
    expected = gradients(draft, exact.loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = run(draft, batch)
    assert rounded.loss.dtype == torch.float32
    torch.testing.assert_close(rounded.loss, exact.loss, atol=0.1, rtol=0.05)
    for name, gradient in gradients(draft, rounded.loss).items():
        assert gradient.dtype == torch.float32
        apart = torch.nn.functional.cosine_similarity(
            gradient.flatten(), expected[name].flatten(), 0
        )
        assert apart > 0.95, name


@pytest.mark.prove
def test_compiling_changes_nothing() -> None:
    """`torch.compile` of the MLP and the divergence: the same loss to 1e-5."""
    draft, batch = a_draft(), pack([a_document("..xxxxxxxxxxxx..xxxx", 51)])
    eager = run(draft, batch)
    expected = gradients(draft, eager.loss)
    for layer in draft.layers:
        layer.mlp.compile(dynamic=True)
    targets = a_head().targets(batch)
    compiled = Unroller(draft, 3, 1.0, torch.compile(kl, dynamic=True)).unroll(batch, targets)
    torch.testing.assert_close(compiled.loss, eager.loss, atol=1e-5, rtol=1e-5)
    assert_same(gradients(draft, compiled.loss), expected, 1e-5)


def test_a_long_document_is_worked_in_chunks_with_the_same_result(monkeypatch) -> None:
    draft, batch = a_draft(), pack([a_document("." * 5 + "x" * 40, 6)])
    whole = gradients(draft, run(draft, batch).loss)
    monkeypatch.setattr("speculators_core.training.attention.CHUNK", 7)
    monkeypatch.setattr("speculators_core.training.loss.ROWS", 5)
    assert_same(gradients(draft, run(draft, batch).loss), whole, 1e-5)


def test_the_attention_gradient_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    heads, kv, tokens, dim = 4, 2, 6, 8
    sees = torch.tensor([2, 3, 5, 1, 2, 2])
    spans = [Span(slice(0, 3), slice(0, 5)), Span(slice(3, 6), slice(5, 7))]
    leaves = [
        torch.randn(1, n, m, dim, dtype=torch.float64, requires_grad=True)
        for n, m in ((kv, 7), (kv, 7), (heads, tokens), (kv, tokens), (kv, tokens))
    ]

    def attended(k0: Tensor, v0: Tensor, q: Tensor, k1: Tensor, v1: Tensor) -> Tensor:
        chains = Queries(tuple(spans), sees)
        attend = UnrolledAttention(chains, last_layer=0)
        attend.begin(chains, None)
        attend.keep([k0[0], v0[0]])
        attend.begin(chains, torch.arange(tokens))
        return attend.holding(attend.kept, chains)(0, q, k1, v1)

    assert torch.autograd.gradcheck(attended, leaves)


def targets_of(p: Tensor) -> Targets:
    return Targets(p, -torch.special.xlogy(p, p).sum(-1), torch.zeros(len(p), dtype=torch.int64))


def test_the_loss_over_the_head_and_its_gradients_are_torchs_own() -> None:
    torch.manual_seed(0)
    normed = torch.randn(9, H, requires_grad=True)
    head = torch.randn(DV, H, requires_grad=True)
    p = torch.softmax(torch.randn(12, DV), -1)
    rows = torch.randint(0, 12, (9,))
    weights = torch.rand(9)
    ours, values, choice = head_loss(normed, head, targets_of(p), rows, weights)
    grads = torch.autograd.grad(2 * ours, (normed, head))
    logits = normed @ head.T
    divergences = F.kl_div(logits.log_softmax(-1), p[rows], reduction="none").sum(-1)
    torch.testing.assert_close(values, divergences.detach(), atol=1e-5, rtol=1e-4)
    plain = (divergences * weights).sum()
    torch.testing.assert_close(ours, plain)
    for grad, expected in zip(grads, torch.autograd.grad(2 * plain, (normed, head)), strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(choice, logits.argmax(-1))


def test_a_perfect_draft_has_loss_zero() -> None:
    logits = torch.randn(4, DV)
    p = torch.softmax(logits, -1)
    ours, _, _ = head_loss(logits, torch.eye(DV), targets_of(p), torch.arange(4), torch.ones(4))
    torch.testing.assert_close(ours, torch.zeros(()), atol=1e-5, rtol=0)


def test_a_truth_outside_the_draft_vocabulary_is_a_miss() -> None:
    draft, document = a_draft(), a_document("..xxxxxx", 7)
    batch = pack([document])
    head = a_head()
    assert set(head.ids.tolist()) == set(range(0, V, V // DV))
    document.states.best.fill_(1)  # never kept
    outside = run(draft, pack([document]))
    assert not outside.accepted.any() and outside.covered == 0
    document.states.best.fill_(0)  # kept, draft id 0
    inside = run(draft, pack([document]))
    assert inside.covered == len(batch.starts)


def test_acceptance_is_joint_over_the_steps() -> None:
    draft, document = a_draft(), a_document("..xxxxxxxx", 8)
    batch, head = pack([document]), a_head()
    targets = head.targets(batch)
    free = unroll(draft, batch, targets, steps=3)
    targets.best.fill_(-1)
    targets.best[1:] = 0
    result = unroll(draft, batch, targets, steps=3)
    assert not result.accepted[0].any()  # step 0 of chain 0 missed: later steps can't count
    assert (result.accepted[:, 1:] <= result.accepted[:, :-1]).all()
    assert torch.equal(free.live, result.live)


def test_live_chains_shrink_by_one_a_turn_and_step() -> None:
    result = run(a_draft(), pack([a_document("..xxxx..xxx", 9)]))
    assert result.live.tolist() == [5, 3, 1]


def test_decay_weighs_later_steps() -> None:
    draft, batch = a_draft(), pack([a_document("..xxxxxx", 10)])
    result = run(draft, batch, decay=0.5)
    means = result.step_losses / result.live
    torch.testing.assert_close(result.loss.detach(), means[0] + means[1] / 2 + means[2] / 4)


def test_serving_weighs_chains_behind_a_miss_more() -> None:
    # one turn of 5 chains; chain 0 accepts 2, chains 1, 2 are never served, chain 3 misses
    accepted = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]]).bool()
    left = torch.tensor([5, 4, 3, 2, 1])
    assert walk(accepted, left) == (5, 3)  # 3 + 1 + 1 (capped by the end of the turn)


def test_the_meter_reads_token_weighted_means() -> None:
    draft, meter = a_draft(), Meter(3)
    results = []
    for seed in (1, 2):
        batch = pack([a_document("..xxxxx" * seed, seed)])
        results.append(run(draft, batch))
        meter.add(results[-1], len(batch.ids), batch.left)
    values = meter.read()
    losses = sum(r.step_losses[0] for r in results) / sum(r.live[0] for r in results)
    assert values["loss_0"] == pytest.approx(float(losses), rel=1e-5)
    assert values["acceptance_length"] == pytest.approx(
        1 + sum(values[f"acceptance_{k}"] for k in range(3))
    )
    assert Meter(3).read() == {}


@pytest.mark.parametrize(
    "switches", [s for s in itertools.product([False, True], repeat=4) if not (s[1] and s[2])]
)
def test_loss_and_gradients_equal_speculators(switches: tuple[bool, ...]) -> None:
    """With every token the assistant's, both masks mean the same; one document, positions
    from 0 here and from 1 there (only differences matter)."""
    chosen = dict(zip(SWITCHES, switches, strict=True))
    draft = a_draft(**chosen)
    document = a_document("x" * 24, 11)
    document = Document(document.ids, torch.ones(24, dtype=torch.bool), document.states)
    ours = run(draft, pack([document]), decay=0.8)
    theirs, loss = speculators_loss(draft, document, decay=0.8)
    torch.testing.assert_close(ours.loss, loss, atol=1e-4, rtol=1e-4)
    mine = gradients(draft, ours.loss)
    theirs.zero_grad()
    loss.backward()
    other = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None and n in mine}
    assert_same(mine, other, 1e-4)
    assert draft.embed_tokens.weight.grad is None  # frozen


def test_where_turns_end_speculators_counts_one_chain_more() -> None:
    """The documented difference: there a chain counts whose newest token is the end of the turn.
    Without the last token of each turn its mask means ours."""
    draft, document = a_draft(), a_document("....xxxxxx..xxx.", 61)
    ours = run(draft, pack([document]), steps=1)
    mask = document.mask
    theirs, loss = speculators_loss(draft, document, 1.0, steps=1, mask=mask & mask.roll(-1))
    torch.testing.assert_close(ours.loss, loss, atol=1e-4, rtol=1e-4)
    mine = gradients(draft, ours.loss)
    loss.backward()
    other = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None and n in mine}
    assert_same(mine, other, 1e-4)
    _, as_they_count = speculators_loss(draft, document, 1.0, steps=1, mask=mask)
    assert abs(float((as_they_count - loss).detach())) > 1e-3  # the two ends of turns, averaged in
    assert int(mask[1:-1].sum()) == int(ours.live[0]) + 2


def speculators_loss(
    draft: Eagle3Draft,
    document: Document,
    decay: float,
    steps: int = 3,
    mask: Tensor | None = None,
):
    """speculators 0.9.0 with the same weights, eager attention and loss."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    values = draft.config.model_dump(exclude={"speculators_config"})
    config = Eagle3SpeculatorConfig(**values)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    head = a_head()
    own = {
        **draft.state_dict(),
        "verifier_norm.weight": head.final_norm.weight.detach(),
        "verifier_lm_head.weight": head.rows,
    }
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not missing and not unexpected
    model.lm_head.weight.requires_grad = True  # frozen there, trained here
    states = document.states
    ids, mask = document.ids, document.mask if mask is None else mask
    _, loss, _ = model(
        hidden_states=states.aux[None, :-1],
        input_ids=ids[None, 1:],
        document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
        loss_mask=torch.cat([mask[1:-1], torch.zeros(1, dtype=torch.bool)])[None],
        verifier_last_hidden_states=states.final[None, 1:],
        ttt_steps=steps,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return model, loss
