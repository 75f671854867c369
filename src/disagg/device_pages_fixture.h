// Two nodes of one process whose pages lie in a device's memory, for tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "disagg/decode_node.h"
#include "disagg/prefill_node.h"
#include "kv/layout_fixture.h"

namespace sluice::disagg::testing {

class DevicePair {
 public:
  DevicePair(DeviceMemory& memory, KvLayout layout, int32_t layer_group, int32_t pages)
      : memory_(memory), layout_(std::move(layout)) {
    NodeOptions o;
    o.bootstrap_port = 0;
    o.self_check = true;
    o.heartbeat_interval = 200'000'000;
    o.heartbeat_max_failure = 10;
    o.rooms.layer_group = layer_group;
    from = *DevicePool::Make(layout_, 1, pages + 1, &memory);
    to = *DevicePool::Make(layout_, 1, pages + 1, &memory);
    for (int32_t p = 1; p <= pages; ++p) {
      from->Poison(PageId(p));
      to->Poison(PageId(p));
    }
    prefill = *PrefillNode::Start(o, layout_, *from, [] {});
    decode = *DecodeNode::Start(o, layout_, *to, [] {});
  }

  static std::byte Value(PageId page, const KvPiece& piece, int64_t i) {
    return std::byte(page.value * 31 + piece.layer.value * 7 + int(piece.component) * 3 + i * 5);
  }
  std::vector<std::byte> Bytes(PageId page, const KvPiece& piece) const {
    std::vector<std::byte> bytes(size_t(piece.bytes));
    for (int64_t i = 0; i < piece.bytes; ++i) bytes[size_t(i)] = Value(page, piece, i);
    return bytes;
  }
  void WriteLayer(LogicalLayer layer, const std::vector<PageId>& pages) {
    for (const KvPiece& piece : layout_.pieces())
      for (const PageId page : pages)
        if (piece.layer == layer)
          memory_.Copy(from->Piece(piece, page), Bytes(page, piece).data(), piece.bytes);
  }
  // Pages of `to` that hold something of this layer else than poison.
  int Arrived(LogicalLayer layer, const std::vector<PageId>& pages) {
    int n = 0;
    std::vector<std::byte> room;
    for (const KvPiece& piece : layout_.pieces())
      for (const PageId page : pages) {
        if (piece.layer != layer) continue;
        const auto bytes = to->Readable(piece, page, &room);
        n += std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte(0xff); });
      }
    return n;
  }
  void ExpectHolds(const std::vector<PageId>& source, const std::vector<PageId>& pages) {
    std::vector<std::byte> room;
    for (size_t i = 0; i < pages.size(); ++i)
      for (const KvPiece& piece : layout_.pieces()) {
        const auto bytes = to->Readable(piece, pages[i], &room);
        ASSERT_TRUE(std::ranges::equal(bytes, Bytes(source[i], piece)))
            << "page " << i << " layer " << piece.layer.value;
      }
  }

  void Open(RoomId room, int64_t tokens, const std::vector<PageId>& pages) {
    prefill->Add(room, tokens, Digest256{1});
    decode->Announce(room, "127.0.0.1", prefill->port());
    decode->Open(room, tokens, Digest256{1}, 0, pages);
  }
  std::optional<RoomEvent> Wait(bool prefill_side, RoomEvent::Kind kind, RoomId room) {
    for (int i = 0; i < 10000; ++i) {
      prefill->TakeEvents(&of_prefill_);
      decode->TakeEvents(&of_decode_);
      for (const RoomEvent& e : prefill_side ? of_prefill_ : of_decode_)
        if (e.kind == kind && e.room == room) return e;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::nullopt;
  }
  // True once `bytes` have been sent in all.
  bool Sent(int64_t bytes) {
    for (int i = 0; i < 10000 && prefill->Stats().bytes_sent < bytes; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return prefill->Stats().bytes_sent == bytes;
  }
  int64_t LayerBytes(LogicalLayer layer) const {
    int64_t n = 0;
    for (const KvPiece& piece : layout_.pieces()) n += piece.layer == layer ? piece.bytes : 0;
    return n;
  }
  const KvLayout& layout() const { return layout_; }

  std::unique_ptr<DevicePool> from, to;
  std::unique_ptr<PrefillNode> prefill;
  std::unique_ptr<DecodeNode> decode;

 private:
  DeviceMemory& memory_;
  const KvLayout layout_;
  std::vector<RoomEvent> of_prefill_, of_decode_;
};

}  // namespace sluice::disagg::testing
