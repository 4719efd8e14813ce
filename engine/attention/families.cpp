// Forks in one call: sequences whose first blocks are the same ones.
#include <algorithm>
#include <functional>

#include "engine/attention/row_block.hpp"

namespace headlong {
namespace {

/// Whether a sequence may share: its first blocks are all there, and it differs from its like in queries alone.
bool may_share(const Sequence& sequence) noexcept {
    if (sequence.cached.blocks == nullptr || sequence.mask.base != nullptr || sequence.positions != nullptr)
        return false;
    const bool forgot = sequence.cached.blocks->front() * kBlock > ceil_div(sequence.sinks, kBlock) * kBlock;
    return !forgot && sequence.q_len > 0 && sequence.kv_end >= kSpan && sequence.kv_end > sequence.sinks;
}

/// Sequences that compare equal have the same first block, queries of the same length, and the same rules.
bool before(const Sequence& a, const Sequence& b) noexcept {
    const bool shares = may_share(a);
    if (shares != may_share(b)) return shares;
    if (!shares) return false;
    const Block& first = (*a.cached.blocks)[0];
    const Block& second = (*b.cached.blocks)[0];
    if (first.slab != second.slab) return std::less<const Slab*>()(first.slab, second.slab);
    if (first.index != second.index) return first.index < second.index;
    if (a.q_len != b.q_len) return a.q_len < b.q_len;
    const KeyTransform* const of_a = a.cached.transform;
    const KeyTransform* const of_b = b.cached.transform;
    if (of_a != of_b) return std::less<const KeyTransform*>()(of_a, of_b);
    if (a.sinks != b.sinks) return a.sinks < b.sinks;
    return a.window < b.window;
}

/// Of the first `most` blocks, those that both have.
std::int64_t same_blocks(const BlockTable& a, const BlockTable& b, std::int64_t most) noexcept {
    std::int64_t same = 0;
    while (same < most && a[same] == b[same]) ++same;
    return same;
}

/// Keys that all of them have in the same blocks: whole spans, and none where they have not all sinks in common.
std::int64_t shared_keys(std::span<const Sequence> family) noexcept {
    const Sequence& first = family.front();
    const std::int64_t of_sinks = ceil_div(first.sinks, kBlock);
    std::int64_t blocks = kForever;
    for (const Sequence& sequence : family) {
        blocks = std::min({blocks, sequence.kv_end / kBlock, sequence.cached.blocks->end()});
        blocks = same_blocks(*sequence.cached.blocks, *first.cached.blocks, blocks);
        if (same_blocks(*sequence.cached_sinks.blocks, *first.cached_sinks.blocks, of_sinks) < of_sinks) return 0;
    }
    return blocks * kBlock / kSpan * kSpan;
}

/// A family is one task a KV head: where that leaves threads idle, what it saves must be more than they would do.
bool pays(const Context::Impl& context, const AttentionProblem& problem, std::span<const Sequence> family,
          std::int64_t shared) noexcept {
    const auto threads = static_cast<double>(context.executor->concurrency());
    const double busy = std::min(threads, static_cast<double>(problem.kv_heads));
    double own = 0.0;
    for (const Sequence& sequence : family) own += static_cast<double>(sequence.kv_end - shared);
    const double together = (static_cast<double>(shared) + own) / busy;
    const double apart = (static_cast<double>(family.size()) * static_cast<double>(shared) + own) / threads;
    return together < apart;
}

}  // namespace

void gather_families(const Context::Impl& context, const AttentionProblem& problem,
                     std::span<Sequence> sequences) noexcept {
    if (sequences.size() < 2 || problem.kv_heads == 0) return;
    const std::int64_t group = problem.heads / problem.kv_heads;
    std::sort(sequences.begin(), sequences.end(), before);
    for (std::size_t first = 0; first < sequences.size();) {
        std::size_t last = first + 1;
        if (may_share(sequences[first])) {
            while (last < sequences.size() && !before(sequences[first], sequences[last])) ++last;
        }
        // A family is one row tile: its keys are read once for all rows.
        const std::int64_t q_len = std::clamp<std::int64_t>(sequences[first].q_len, 1, kRowTile);
        const std::int64_t most = group > kRowTile ? 0 : kRowTile / (group * q_len);
        const auto members = std::min(static_cast<std::int64_t>(last - first), most);
        if (members > 1) {
            const std::span<Sequence> family = sequences.subspan(first, size(members));
            const std::int64_t shared = shared_keys(family);
            if (shared > 0 && shared >= sequences[first].sinks && pays(context, problem, family, shared)) {
                for (Sequence& sequence : family) sequence.family = 0;
                family.front().family = members;
                family.front().shared = shared;
                first += size(members);
                continue;
            }
        }
        ++first;
    }
}

}  // namespace headlong
