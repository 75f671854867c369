#include "transfer/wire.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "fmt/ranges.h"

namespace sluice::transfer {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

constexpr uint32_t kMagic = 0x31434c53;  // "SLC1"
constexpr size_t kHeaderBytes = 12;

class Writer {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Put(T v) {
    const auto* p = reinterpret_cast<const std::byte*>(&v);
    out.insert(out.end(), p, p + sizeof(T));
  }
  void Put(Role r) { Put(uint8_t(r)); }
  void Put(const std::string& s) {
    Put(uint32_t(s.size()));
    const auto* p = reinterpret_cast<const std::byte*>(s.data());
    out.insert(out.end(), p, p + s.size());
  }
  void Put(const Digest256& d) {
    const auto* p = reinterpret_cast<const std::byte*>(d.data());
    out.insert(out.end(), p, p + d.size());
  }
  void Put(const LayerCount& c) {
    Put(c.component);
    Put(c.layer);
    Put(c.pages);
  }
  void Put(const RoomProgress& p) {
    Put(p.layers);
    Put(p.bytes);
    Put(p.error);
  }
  void Put(const AuxToken& t) {
    Put(t.token);
    Put(t.logprob);
    Put(t.top);
    Put(t.logits_hash);
  }
  void Put(const std::pair<int32_t, float>& p) {
    Put(p.first);
    Put(p.second);
  }
  template <typename T>
  void Put(const std::vector<T>& v) {
    Put(uint32_t(v.size()));
    for (const T& x : v) Put(x);
  }
  std::vector<std::byte> out;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Get(T& v) {
    if (!Has(sizeof(T))) return;
    std::memcpy(&v, in_.data() + at_, sizeof(T));
    at_ += sizeof(T);
  }
  void Get(Role& r) {
    uint8_t v = 0;
    Get(v);
    if (v != 1 && v != 2) ok_ = false;
    r = Role(v);
  }
  void Get(std::string& s) {
    uint32_t n = 0;
    Get(n);
    if (!Has(n)) return;
    s.assign(reinterpret_cast<const char*>(in_.data() + at_), n);
    at_ += n;
  }
  void Get(Digest256& d) {
    if (!Has(d.size())) return;
    std::memcpy(d.data(), in_.data() + at_, d.size());
    at_ += d.size();
  }
  void Get(LayerCount& c) {
    Get(c.component);
    Get(c.layer);
    Get(c.pages);
  }
  void Get(RoomProgress& p) {
    Get(p.layers);
    Get(p.bytes);
    Get(p.error);
  }
  void Get(AuxToken& t) {
    Get(t.token);
    Get(t.logprob);
    Get(t.top);
    Get(t.logits_hash);
  }
  void Get(std::pair<int32_t, float>& p) {
    Get(p.first);
    Get(p.second);
  }
  template <typename T>
  void Get(std::vector<T>& v) {
    uint32_t n = 0;
    Get(n);
    // Every element takes at least a byte, so a count beyond the rest of the payload is a lie: refuse before
    // allocating.
    if (!Has(n)) return;
    v.reserve(std::min<size_t>(n, (in_.size() - at_) / MinBytes<T>() + 1));
    for (uint32_t i = 0; i < n && ok_; ++i) Get(v.emplace_back());
  }
  bool Done() const { return ok_ && at_ == in_.size(); }

 private:
  template <typename T>
  static constexpr size_t MinBytes() {
    if constexpr (std::is_same_v<T, std::string>) return 4;
    if constexpr (std::is_same_v<T, LayerCount>) return 9;
    if constexpr (std::is_same_v<T, AuxToken>) return 20;
    if constexpr (std::is_same_v<T, RoomProgress>) return 16;
    return sizeof(T);
  }
  bool Has(size_t n) {
    if (ok_ && in_.size() - at_ < n) ok_ = false;
    return ok_;
  }
  std::span<const std::byte> in_;
  size_t at_ = 0;
  bool ok_ = true;
};

// One list of fields per message, used by writing and reading alike.
template <typename S>
void Fields(S&& s, auto& m) {
  using M = std::remove_cvref_t<decltype(m)>;
  if constexpr (std::is_same_v<M, Hello>) {
    s(m.instance_id, m.epoch, m.role, m.model_name, m.content_fingerprint, m.numerics_class, m.page_tokens,
      m.latent_dtype, m.index_dtype, m.latent_page_bytes, m.index_page_bytes, m.latent_layers, m.index_layers,
      m.lanes, m.pages_per_lane, m.max_tokens, m.max_rooms, m.regions, m.host_id, m.transports, m.own_end);
  } else if constexpr (std::is_same_v<M, HelloAck>) {
    s(m.epoch, m.refusal, m.transport);
  } else if constexpr (std::is_same_v<M, Reserve>) {
    s(m.room, m.epoch, m.prompt_tokens, m.prompt_digest, m.first_page, m.sender_epoch, m.pages);
  } else if constexpr (std::is_same_v<M, Complete>) {
    s(m.room, m.bytes, m.counts, m.aux.first_token, m.aux.logprob, m.aux.top_logprobs, m.aux.cached_device,
      m.aux.cached_host, m.aux.cached_storage, m.aux.logits_hash, m.aux.other_choices, m.aux.prompt_logprobs,
      m.aux.draft_tokens, m.aux.draft_hidden, m.page_digests);
  } else if constexpr (std::is_same_v<M, Failed>) {
    s(m.room, m.phase, m.reason);
  } else if constexpr (std::is_same_v<M, Abort>) {
    s(m.room, m.attempt, m.reason, m.sender_epoch);
  } else if constexpr (std::is_same_v<M, AbortAck>) {
    s(m.room);
  } else if constexpr (std::is_same_v<M, Heartbeat>) {
    s(m.epoch, m.sequence, m.rooms, m.progress);
  } else if constexpr (std::is_same_v<M, DataPath>) {
    s(m.address);
  } else {
    static_assert(std::is_same_v<M, Taken>);
    s(m.messages);
  }
}

template <size_t... I>
StatusOr<ControlMessage> DecodePayload(uint16_t type, std::span<const std::byte> payload,
                                       std::index_sequence<I...>) {
  StatusOr<ControlMessage> result =
      Invalid("control frame: unknown type {}; this build knows 1 to {}", type, sizeof...(I));
  const auto try_one = [&]<size_t J>() {
    if (type != J + 1) return;
    std::variant_alternative_t<J, ControlMessage> m;
    Reader reader(payload);
    Fields([&](auto&... f) { (reader.Get(f), ...); }, m);
    if (reader.Done())
      result = ControlMessage(std::move(m));
    else
      result = Invalid("control frame: {} of {} bytes is truncated, too long or malformed",
                       TypeName(ControlMessage(m)), payload.size());
  };
  (try_one.template operator()<I>(), ...);
  return result;
}

// Header of a frame at the start of `bytes`: type and payload size, nullopt when not all there.
struct Header {
  uint16_t type = 0;
  uint32_t payload = 0;
};
StatusOr<std::optional<Header>> ParseHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes) return std::optional<Header>();
  uint32_t magic = 0;
  uint16_t version = 0;
  Header h;
  std::memcpy(&magic, bytes.data(), 4);
  std::memcpy(&version, bytes.data() + 4, 2);
  std::memcpy(&h.type, bytes.data() + 6, 2);
  std::memcpy(&h.payload, bytes.data() + 8, 4);
  if (magic != kMagic)
    return Invalid("control frame: magic {:#x}, expected {:#x}; the peer does not speak this protocol", magic,
                   kMagic);
  if (version != kProtocolVersion)
    return Invalid(
        "control frame: protocol version {} of the peer, this side speaks {}; run the same release on both",
        version, kProtocolVersion);
  if (h.payload > kMaxPayloadBytes)
    return Invalid("control frame: payload of {} bytes, limit {}", h.payload, kMaxPayloadBytes);
  return std::optional<Header>(h);
}

}  // namespace

std::vector<std::byte> Encode(const ControlMessage& message) {
  Writer w;
  w.Put(kMagic);
  w.Put(kProtocolVersion);
  w.Put(uint16_t(message.index() + 1));
  w.Put(uint32_t(0));
  std::visit([&](const auto& m) { Fields([&](const auto&... f) { (w.Put(f), ...); }, m); }, message);
  const uint32_t payload = uint32_t(w.out.size() - kHeaderBytes);
  std::memcpy(w.out.data() + 8, &payload, 4);
  return std::move(w.out);
}

size_t EncodedBytes(const Aux& aux) {
  constexpr size_t kOthers = kHeaderBytes + 8 + 8 + 4 + 4;  // room, bytes, and the two lists' counts
  Complete whole;
  whole.aux = aux;
  return Encode(whole).size() - kOthers;
}

StatusOr<ControlMessage> Decode(std::span<const std::byte> frame) {
  ASSIGN_OR_RETURN(const std::optional<Header> header, ParseHeader(frame));
  if (!header || frame.size() != kHeaderBytes + header->payload)
    return Invalid("control frame: {} bytes, header says {}", frame.size(),
                   header ? int64_t(kHeaderBytes + header->payload) : -1);
  return DecodePayload(header->type, frame.subspan(kHeaderBytes),
                       std::make_index_sequence<std::variant_size_v<ControlMessage>>());
}

const char* TypeName(const ControlMessage& message) {
  static constexpr const char* kNames[] = {"Hello", "HelloAck", "Reserve",   "Complete", "Failed",
                                           "Abort", "AbortAck", "Heartbeat", "DataPath", "Taken"};
  static_assert(std::size(kNames) == std::variant_size_v<ControlMessage>);
  return kNames[message.index()];
}

void FrameReader::Feed(std::span<const std::byte> bytes) {
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  }
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

StatusOr<std::optional<ControlMessage>> FrameReader::Next() {
  const std::span<const std::byte> rest(buffer_.data() + begin_, buffer_.size() - begin_);
  ASSIGN_OR_RETURN(const std::optional<Header> header, ParseHeader(rest));
  if (!header || rest.size() < kHeaderBytes + header->payload) return std::optional<ControlMessage>();
  ASSIGN_OR_RETURN(ControlMessage m, Decode(rest.first(kHeaderBytes + header->payload)));
  begin_ += kHeaderBytes + header->payload;
  return std::optional<ControlMessage>(std::move(m));
}

Status CheckCompatible(const Hello& a, const Hello& b, bool allow_mixed_numerics) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* name, const auto& x, const auto& y) {
    if (x != y) differences.push_back(fmt::format("{}: {} here, {} there", name, x, y));
  };
  compare("page_tokens", a.page_tokens, b.page_tokens);
  compare("kv_cache_dtype", a.latent_dtype, b.latent_dtype);
  compare("index_cache_dtype", a.index_dtype, b.index_dtype);
  compare("latent_layers", a.latent_layers, b.latent_layers);
  compare("index_layers", a.index_layers, b.index_layers);
  compare("latent_page_bytes", a.latent_page_bytes, b.latent_page_bytes);
  compare("index_page_bytes", a.index_page_bytes, b.index_page_bytes);
  if (!allow_mixed_numerics) compare("numerics_class", a.numerics_class, b.numerics_class);
  // Named last: the fingerprint covers all of the above and the model's identity, so alone it means another
  // model or rope.
  if (differences.empty() && !allow_mixed_numerics && a.content_fingerprint != b.content_fingerprint)
    differences.push_back(fmt::format(
        "content fingerprint (model identity, rope pairing, scale rule): {} of {} here, {} of {} there",
        Hex(a.content_fingerprint).substr(0, 16), a.model_name, Hex(b.content_fingerprint).substr(0, 16),
        b.model_name));
  if (a.role == b.role)
    differences.push_back(fmt::format("role: both are {}", a.role == Role::kPrefill ? "prefill" : "decode"));
  if (differences.empty()) return OkStatus();
  return Unavailable("instances {} and {} cannot exchange KV: {}", a.instance_id, b.instance_id,
                     fmt::join(differences, "; "));
}

}  // namespace sluice::transfer
