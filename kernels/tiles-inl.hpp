// How kernels walk a matrix in register tiles. Compiled per instruction set.
#pragma once

#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

/// The register tiles of kernels on floats, and of weights x values of codes: rows of a full tile, accumulators in all.
struct FloatTiles {
    static constexpr std::size_t kRows = kTileRows;
    static constexpr std::size_t kVectors = kTileVectors;
};
struct PairTiles {
    static constexpr std::size_t kRows = kPairTileRows;
    static constexpr std::size_t kVectors = kPairTileVectors;
};

/// Columns of a tile of `rows` rows, in panels of 16: as many as the accumulators allow, at most the 4 of a block.
/// Few rows take more panels, so that enough independent sums are under way to hide the latency of the FMA.
template <class Tiles>
constexpr std::size_t tile_panels(std::size_t rows) noexcept {
    const std::size_t panels = Tiles::kVectors / (rows * kPanelVectors);
    return panels < 1 ? 1 : panels > 4 ? 4 : panels;
}

/// What is left over by tiles of 3 rows joins the last of them where the registers hold both: a tile of 4 rows reads
/// its columns once, one of 3 and one of 1 twice. Of larger tiles less is left over, and every size more is compile
/// time.
template <class Tiles>
inline constexpr std::size_t kMostTileRows =
    Tiles::kRows > 3 || Tiles::kVectors / kPanelVectors < 2 * Tiles::kRows - 1 ? Tiles::kRows : 2 * Tiles::kRows - 1;

/// Fewer rows than this are a stream from memory: they take panels one by one, all rows before the next, so that memory
/// is read from front to back. More rows take as many panels as registers hold, and tiles keep their sums for longer.
inline constexpr std::size_t kManyRows = 12;

/// Rows of a streaming tile: as many as registers hold of one panel; 8 hide the latency of the FMA and are fewer sizes
/// to compile.
template <class Tiles>
inline constexpr std::size_t kStreamRows = Tiles::kVectors / kPanelVectors < 8 ? Tiles::kVectors / kPanelVectors : 8;

/// Whether a tile's loop is unrolled: full tiles, and those of streams.
template <class Tiles, std::size_t Rows, std::size_t Panels>
inline constexpr bool kUnrolled = (Rows == Tiles::kRows && Panels == tile_panels<Tiles>(Tiles::kRows)) || Panels == 1;

// Steps between two looks at what is asked for ahead; unrolled.
inline constexpr std::size_t kStepsAtOnce = 4;

// How far ahead a stream asks for memory. Of 0.25 to 16 KiB, 1 and 2 were as fast as any (bench/RESULTS.md), and 2 is
// for memory that is further away.
inline constexpr std::size_t kStreamAhead = 2048;

// Panels of so many bytes are streams of their own: the processor follows several at once, and four side by side come
// from memory a fifth faster than one after the other (bench/RESULTS.md). Those of keys, 16 KiB at most, end before it
// has found them.
inline constexpr std::size_t kLongPanelBytes = 17U << 10U;

/// Memory that will be read soon, asked for in the order in which it is read, and put in L2: lines in any other order
/// (parts of the next block side by side) came at two thirds of the speed. A region is followed by another one.
class Ahead {
  public:
    /// The region [begin, begin + bytes) is read, and then `next` (null: what follows in memory). A stream asks for
    /// what is read soon; many rows, which spend longer on it, for the same place of the next region.
    HEADLONG_INLINE Ahead(const void* begin, std::size_t bytes, const void* next, std::size_t row_count) noexcept
        : end_(reinterpret_cast<std::uintptr_t>(begin) + bytes),
          jump_(next == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(next) - end_),
          distance_(row_count < kManyRows || next == nullptr ? kStreamAhead : bytes) {}

    /// Called when the `Bytes` at `p` are read: asks for their like.
    template <std::size_t Bytes>
    HEADLONG_INLINE void ask(const void* p) const noexcept {
        std::uintptr_t at = reinterpret_cast<std::uintptr_t>(p) + distance_;
        at += at >= end_ ? jump_ : 0;
        HEADLONG_UNROLL for (std::size_t i = 0; i < Bytes; i += kernels::kAlignment) {
            compiler::prefetch_to_second_level(
                reinterpret_cast<const void*>(at + i));  // past the end it is only asked for
        }
    }

  private:
    std::uintptr_t end_;
    std::uintptr_t jump_;
    std::size_t distance_;
};

/// Calls step(k) for k < count, and ask(k) before every kStepsAtOnce of them.
template <class Tiles, std::size_t Rows, std::size_t Panels, class Step, class Ask>
HEADLONG_INLINE void for_steps(std::size_t count, const Step& step, const Ask& ask) noexcept {
    std::size_t k = 0;
    for (; k + kStepsAtOnce <= count; k += kStepsAtOnce) {
        ask(k);
        if constexpr (kUnrolled<Tiles, Rows, Panels>) {
            HEADLONG_UNROLL for (std::size_t i = 0; i < kStepsAtOnce; ++i) step(k + i);
        } else {
            HEADLONG_KEEP_LOOP for (std::size_t i = 0; i < kStepsAtOnce; ++i) step(k + i);
        }
    }
    for (; k < count; ++k) step(k);
}

/// One step of a tile's sums: add(row(r), column(v), sums[r][v]). The longer of the two sides is loaded one register at
/// a time, so that a tile needs Rows * Vectors + min(Rows, Vectors) + 1 registers.
template <std::size_t Rows, std::size_t Vectors, class Sum, class Row, class Column, class Add>
HEADLONG_INLINE void multiply_add(Sum (&sums)[Rows][Vectors], const Row& row, const Column& column,
                                  const Add& add) noexcept {
    if constexpr (Rows < Vectors) {
        decltype(row(0)) x[Rows];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) x[r] = row(r);
        HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) {
            const auto y = column(v);
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) add(x[r], y, sums[r][v]);
        }
    } else {
        decltype(column(0)) y[Vectors];
        HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) y[v] = column(v);
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            const auto x = row(r);
            HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) add(x, y[v], sums[r][v]);
        }
    }
}
/// The same with sums[r][v] += row(r) * column(v) in floats.
template <std::size_t Rows, std::size_t Vectors, class Row, class Column>
HEADLONG_INLINE void multiply_add(F32 (&sums)[Rows][Vectors], const Row& row, const Column& column) noexcept {
    multiply_add(sums, row, column, [](F32 x, F32 y, F32& sum) noexcept { sum = fma(x, y, sum); });
}

/// Rows of a tile of `panels` panels where fewer than a full tile's are left: a multiple of a full tile's, up to two.
template <class Tiles>
constexpr std::size_t tall_tile_rows(std::size_t panels) noexcept {
    return Tiles::kVectors / (panels * kPanelVectors) < 2 * Tiles::kRows ? Tiles::kRows : 2 * Tiles::kRows;
}

template <std::size_t Rows, std::size_t Panels, class Body, class Tiles = typename Body::Tiles>
HEADLONG_INLINE void for_panels(std::size_t row, std::size_t panel, std::size_t panel_count,
                                const Body& body) noexcept {
    for (; panel + Panels <= panel_count; panel += Panels) body.template operator()<Rows, Panels>(row, panel);
    if constexpr (Panels > 1) {
        if (panel < panel_count) for_panels<Rows, Panels - 1>(row, panel, panel_count, body);
    }
}

template <std::size_t Rows, class Body, class Tiles = typename Body::Tiles>
HEADLONG_INLINE void for_rest_rows(std::size_t row, std::size_t rows, std::size_t panel_count,
                                   const Body& body) noexcept {
    if (rows == Rows) {
        for_panels<Rows, tile_panels<Tiles>(Rows)>(row, 0, panel_count, body);
    } else if constexpr (Rows > 1) {
        for_rest_rows<Rows - 1>(row, rows, panel_count, body);
    }
}

/// The last panels, fewer than a full tile has; row_count is a multiple of a full tile's rows.
template <std::size_t Panels, class Body, class Tiles = typename Body::Tiles>
HEADLONG_INLINE void for_rest_panels(std::size_t row_count, std::size_t panel, std::size_t panels,
                                     const Body& body) noexcept {
    if (panels == Panels) {
        constexpr std::size_t kRows = tall_tile_rows<Tiles>(Panels);
        std::size_t row = 0;
        for (; row + kRows <= row_count; row += kRows) body.template operator()<kRows, Panels>(row, panel);
        if (row < row_count) body.template operator()<Tiles::kRows, Panels>(row, panel);
    } else if constexpr (Panels > 1) {
        for_rest_panels<Panels - 1>(row_count, panel, panels, body);
    }
}

/// The rows [row, row_count) of one panel.
template <class Body, std::size_t Rows = kStreamRows<typename Body::Tiles>>
HEADLONG_INLINE void for_stream_rows(std::size_t row, std::size_t row_count, std::size_t panel,
                                     const Body& body) noexcept {
    for (; row + Rows <= row_count; row += Rows) body.template operator()<Rows, 1>(row, panel);
    if constexpr (Rows > 1) {
        if (row < row_count) for_stream_rows<Body, Rows - 1>(row, row_count, panel, body);
    }
}

/// Calls body.operator()<rows, panels>(row, panel) for tiles that cover [0, row_count) x [0, panel_count): column
/// by column of tiles, so that a column's panels stay in L1 while the rows pass.
template <class Body, class Tiles = typename Body::Tiles>
HEADLONG_INLINE void for_tiles(std::size_t row_count, std::size_t panel_count, const Body& body) noexcept {
    if constexpr (requires { body.panel_bytes(); }) {
        if (row_count <= kMostTileRows<Tiles> && body.panel_bytes() >= kLongPanelBytes) {
            return for_rest_rows<kMostTileRows<Tiles>>(0, row_count, panel_count, body);
        }
    }
    if (row_count < kManyRows) {
        for (std::size_t panel = 0; panel < panel_count; ++panel) for_stream_rows(0, row_count, panel, body);
        return;
    }
    constexpr std::size_t kPanels = tile_panels<Tiles>(Tiles::kRows);
    std::size_t rest = row_count % Tiles::kRows;
    if (rest != 0 && rest < row_count && rest + Tiles::kRows <= kMostTileRows<Tiles>) rest += Tiles::kRows;
    const std::size_t full_rows = row_count - rest;
    if (full_rows > 0) {
        std::size_t panel = 0;
        for (; panel + kPanels <= panel_count; panel += kPanels) {
            for (std::size_t row = 0; row < full_rows; row += Tiles::kRows) {
                body.template operator()<Tiles::kRows, kPanels>(row, panel);
            }
        }
        if constexpr (kPanels > 1) {
            if (panel < panel_count) for_rest_panels<kPanels - 1>(full_rows, panel, panel_count - panel, body);
        }
    }
    if (rest > 0) for_rest_rows<kMostTileRows<Tiles>>(full_rows, rest, panel_count, body);
}

}  // namespace headlong::HEADLONG_ISA
