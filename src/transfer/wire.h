// Control messages between prefill and decode instances: versioned, length-framed, validated. Bulk KV never
// travels here.
//
// Frame: u32 magic "SLC1" | u16 version | u16 type | u32 payload bytes | payload. Little endian. Strings and
// lists carry a u32 count. A payload must be consumed exactly; anything else is a malformed frame, and a
// malformed frame costs the peer its connection, never the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/status.h"

namespace sluice::transfer {

constexpr uint16_t kProtocolVersion = 4;
constexpr uint32_t kMaxPayloadBytes =
    16u << 20;  // a reservation of 4 M pages; the largest message that makes sense

using RoomId = uint64_t;

enum class Role : uint8_t { kPrefill = 1, kDecode = 2 };

// What must be equal on both sides (layout) and what is data for the other side (placement, regions).
struct Hello {
  std::string instance_id;
  uint64_t epoch = 0;  // a restart behind the same address has another epoch
  Role role = Role::kPrefill;
  std::string model_name;
  Digest256 content_fingerprint{};
  std::string numerics_class;
  uint32_t page_tokens = 0;
  std::string latent_dtype, index_dtype;
  uint64_t latent_page_bytes = 0, index_page_bytes = 0;
  std::vector<int32_t> latent_layers, index_layers;  // logical ids
  uint32_t lanes = 1;
  uint64_t pages_per_lane = 0;
  uint64_t max_tokens = 0;
  uint32_t max_rooms = 0;
  std::vector<std::string> regions;     // per lane: transport's handle of its arena
  std::string host_id;                  // equal on both sides: shared memory can work
  std::vector<std::string> transports;  // that this side accepts, best first
  // Decode's end of this connection as it sees it: another one than prefill sees tells of a proxy between.
  std::string own_end;
};

struct HelloAck {
  uint64_t epoch = 0;
  std::string refusal;    // "" = accepted
  std::string transport;  // that pages of this connection travel by, one of Hello::transports
};

// Decode to prefill, before it reserves anything: where a transport with connections of its own reaches it.
struct DataPath {
  std::string address;  // that transport's business
};

// Decode to prefill: these messages of such a transport are placed, or thrown away. Of bulk frames on this
// connection: all up to the one that is named.
struct Taken {
  std::vector<uint64_t> messages;
};

// Decode to prefill: the prompt's pages [first_page, first_page + pages.size()) go to these pages of the
// sender.
struct Reserve {
  RoomId room = 0;
  uint64_t epoch = 0;  // of the receiver as the sender knows it
  uint64_t prompt_tokens = 0;
  Digest256 prompt_digest{};
  uint32_t first_page = 0;  // pages before it are in decode's own cache
  std::vector<int32_t> pages;
  // Of the sender. The same reservation from the same epoch on another connection: the one before broke, the
  // room goes on from what has arrived.
  uint64_t sender_epoch = 0;
  friend bool operator==(const Reserve&, const Reserve&) = default;
};

struct LayerCount {
  uint8_t component = 0;  // KvComponent
  int32_t layer = 0;      // logical id
  uint32_t pages = 0;
  friend bool operator==(const LayerCount&, const LayerCount&) = default;
};

struct AuxToken {
  int32_t token = -1;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
  uint64_t logits_hash = 0;
  friend bool operator==(const AuxToken&, const AuxToken&) = default;
};

// What decode cannot know from the rows: travels with the last chunk.
struct Aux {
  int32_t first_token = -1;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top_logprobs;
  int32_t cached_device = 0, cached_host = 0, cached_storage = 0;
  uint64_t logits_hash = 0;
  std::vector<AuxToken> other_choices;    // first tokens of choices 1, 2, ...
  std::vector<AuxToken> prompt_logprobs;  // when the request asked for them
  std::vector<int32_t> draft_tokens;      // seeds of the draft, request-relative
  std::vector<float> draft_hidden;        // last hidden state, for the draft layer
  friend bool operator==(const Aux&, const Aux&) = default;
};

struct Complete {
  RoomId room = 0;
  uint64_t bytes = 0;
  std::vector<LayerCount> counts;
  Aux aux;
  std::vector<Digest256> page_digests;  // empty unless the self-check is on: one per sent page, all layers
};

struct Failed {
  RoomId room = 0;
  std::string phase, reason;
};

struct Abort {
  RoomId room = 0;
  uint32_t attempt = 0;
  std::string reason;
  uint64_t sender_epoch = 0;  // as in Reserve
};

struct AbortAck {  // no writer of mine is active any more for this room
  RoomId room = 0;
};

// Prefill to decode: alive, and these rooms of yours are queued or running here. A room that is missing from
// the list gets no sign of life from it, so a lost frame ends by that room's deadline while queue time on a
// healthy peer does not.
struct RoomProgress {  // how far the sender is, for the receiver's report when it gives up
  uint32_t layers = 0;
  uint64_t bytes = 0;
  std::string error;  // the last one
  friend bool operator==(const RoomProgress&, const RoomProgress&) = default;
};
struct Heartbeat {
  uint64_t epoch = 0;
  uint64_t sequence = 0;
  std::vector<RoomId> rooms;
  std::vector<RoomProgress> progress;  // of each of them, or empty
};

using ControlMessage =
    std::variant<Hello, HelloAck, Reserve, Complete, Failed, Abort, AbortAck, Heartbeat, DataPath, Taken>;

std::vector<std::byte> Encode(const ControlMessage& message);
// One whole frame. Errors name what is wrong.
StatusOr<ControlMessage> Decode(std::span<const std::byte> frame);
size_t EncodedBytes(const Aux& aux);  // what it takes of a frame
const char* TypeName(const ControlMessage& message);

// Cuts a byte stream into frames. After an error the stream is dead.
class FrameReader {
 public:
  void Feed(std::span<const std::byte> bytes);
  // The next whole frame, nullopt when more bytes are needed.
  StatusOr<std::optional<ControlMessage>> Next();

 private:
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;
};

// Unavailable when anything that matters differs: each difference with both values.
Status CheckCompatible(const Hello& mine, const Hello& theirs, bool allow_mixed_numerics);

}  // namespace sluice::transfer
