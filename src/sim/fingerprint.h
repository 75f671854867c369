// KV rows that prove where they come from: the stand-in for a model's KV in simulation.
//
// The row of a position in a piece holds (chain ^ key of the piece, token | position << 32), where
// chain(p) = mix(chain(p - 1), token(p)) and chain(-1) is the namespace's root; its last bytes hold the chain
// again. A row that belongs to another prefix, namespace, position, layer or component, that is not written
// yet, or that was torn, is told from the right one whatever copies it went through. Rows lie in a real
// DevicePool with the strides of a real KvLayout.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "kv/device_pool.h"

namespace sluice::sim {

constexpr uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t z = (a ^ (b * 0x9E3779B97F4A7C15ull)) + 0x632BE59BD9B4E019ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
inline uint64_t NamespaceRoot(std::string_view name_space) {
  uint64_t h = 0x51CE;
  for (const char c : name_space) h = Mix(h, uint8_t(c));
  return h;
}
constexpr uint64_t NextInChain(uint64_t chain, int32_t token) {
  return Mix(chain, uint64_t(uint32_t(token)) + 1);
}

// Small enough for millions of rows a second: 3 layers, index K on two of them, and the draft layer when
// asked for.
ModelConfig SimModel();
KvLayout SimLayout(DType latent, DType index, bool draft, uint64_t identity);

class FingerprintRows {
 public:
  explicit FingerprintRows(const DevicePool* pool);

  int pieces() const { return int(pieces_.size()); }
  LogicalLayer layer(int piece) const { return pieces_[size_t(piece)].piece->layer; }

  void Write(int piece, PageId page, int64_t row, uint64_t chain, int32_t token, int64_t position) const {
    const Piece& p = pieces_[size_t(piece)];
    std::byte* at = Row(p, page, row);
    const uint64_t words[2] = {chain ^ p.key, uint64_t(uint32_t(token)) | uint64_t(position) << 32};
    std::memcpy(at, words, sizeof(words));
    std::memcpy(Tail(p, page, row), &chain, 4);
  }
  // What lies there: chain and token; false when it is not a row of this piece and position.
  bool Read(int piece, PageId page, int64_t row, int64_t position, uint64_t* chain, int32_t* token) const {
    const Piece& p = pieces_[size_t(piece)];
    uint64_t words[2];
    std::memcpy(words, Row(p, page, row), sizeof(words));
    uint32_t tail;
    std::memcpy(&tail, Tail(p, page, row), sizeof(tail));
    *chain = words[0] ^ p.key;
    *token = int32_t(uint32_t(words[1]));
    return words[1] >> 32 == uint64_t(position) && tail == uint32_t(*chain);
  }
  bool Is(int piece, PageId page, int64_t row, uint64_t chain, int32_t token, int64_t position) const {
    uint64_t c;
    int32_t t;
    return Read(piece, page, row, position, &c, &t) && c == chain && t == token;
  }

 private:
  struct Piece {
    const KvPiece* piece;
    uint64_t key;
    int64_t stride;                // of a row's first bytes
    int64_t tail_at, tail_stride;  // where 4 more bytes of the row lie (fp8 index K: its scale)
  };
  std::byte* Row(const Piece& p, PageId page, int64_t row) const {
    return pool_->Piece(*p.piece, page) + row * p.stride;
  }
  std::byte* Tail(const Piece& p, PageId page, int64_t row) const {
    return pool_->Piece(*p.piece, page) + p.tail_at + row * p.tail_stride;
  }

  const DevicePool* pool_;
  std::vector<Piece> pieces_;
};

}  // namespace sluice::sim
