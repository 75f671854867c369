// Prefill and decode rooms of four instances: a network that loses, doubles, delays and reorders frames,
// one-sided writes that land when they like, fail or hang, connections that break under living instances and
// are made again, instances that crash, restart or stop, clients that leave, tiny pools, chunks that cannot
// be registered. Every byte that lands is checked against the lease of its page, every row that decode takes
// against what prefill computed. With ranks (pd+cp), each instance has its own number of them, a page lies in
// its owner's memory, and each rank of prefill writes its own pages.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>

#include "base/random.h"
#include "kv/device_pool.h"
#include "sim/report.h"
#include "transfer/decode_rooms.h"
#include "transfer/prefill_rooms.h"

namespace sluice::sim {
namespace {

using namespace transfer;  // NOLINT: the scenario is about nothing else

constexpr Nanos kMs = 1'000'000;
constexpr int kLayers = 5;  // the last one has no hook, as a draft layer

KvLayout Layout() {
  ModelConfig m;
  m.num_layers = kLayers;
  m.num_heads = 1;
  m.kv_lora_rank = 64;
  m.qk_rope = 32;
  m.index.num_heads = 1;
  m.index.head_dim = 32;
  m.index.topk = 16;
  m.index.computes = {true, false, true, false, true};
  m.layer_is_moe.assign(kLayers, false);
  return KvLayout::Make(m, {}).value();
}

uint64_t RowValue(RoomId room, int32_t ordinal, int32_t layer) {
  return room * 1000003ull + uint64_t(ordinal) * 101 + uint64_t(layer) + 1;
}

struct Faults {
  double drop = 0, duplicate = 0, delay = 0;
  double crash = 0, stop = 0, cut = 0, abort = 0, write_error = 0, hang = 0, registration = 0;
};

class PdWorld {
 public:
  PdWorld(uint64_t seed, bool trace, int prefills, int decodes, bool ranks)
      : journal_(trace), random_(seed), layout_(Layout()) {
    // Each seed has its own weather: few faults at once find what a storm hides.
    const auto some = [&](double most) { return random_.Chance(0.5) ? random_.Unit() * most : 0.0; };
    faults_ = {.drop = some(0.06),
               .duplicate = some(0.15),
               .delay = some(0.25),
               .crash = some(0.012),
               .stop = some(0.02),
               .cut = some(0.03),
               .abort = some(0.7),
               .write_error = some(0.06),
               .hang = some(0.02),
               .registration = some(0.1)};
    if (random_.Chance(0.1)) faults_ = {.duplicate = faults_.duplicate, .cut = random_.Unit() * 0.02};
    const bool calm = faults_.drop == 0 && faults_.delay == 0 && faults_.crash == 0 && faults_.stop == 0 &&
                      faults_.write_error == 0 && faults_.hang == 0;
    quiet_ = calm && faults_.cut == 0;
    only_cuts_ = calm && faults_.abort == 0 && faults_.registration == 0;
    pool_pages_ = int32_t(12 + random_.Below(60));
    options_.bootstrap_timeout = 3000 * kMs;
    options_.waiting_timeout = options_.sending_timeout = 3000 * kMs;
    options_.abort_repeat = 200 * kMs;
    options_.abort_fence = 1500 * kMs;
    options_.resume_timeout = 1500 * kMs;
    options_.tombstone = 20000 * kMs;
    options_.layer_group = int32_t(1 + random_.Below(4));
    options_.per_layer = !random_.Chance(0.2);
    for (int i = 0; i < prefills; ++i) prefill_.push_back({});
    for (int i = 0; i < decodes; ++i) decode_.push_back({});
    for (PrefillSide& p : prefill_) p.lanes = ranks ? int32_t(1 + random_.Below(8)) : 1;
    for (int i = 0; i < prefills; ++i) StartPrefill(i);
    for (DecodeSide& d : decode_) {
      d.lanes = ranks ? int32_t(1 + random_.Below(8)) : 1;
      const int32_t pages = int32_t(CeilDiv(pool_pages_, d.lanes)) * d.lanes;
      RoomOptions o = options_;
      o.epoch = uint64_t(1000 + &d - decode_.data());
      d.rooms = std::make_unique<DecodeRooms>(layout_, o);
      d.lease.assign(size_t(pages), 0);
      d.memory.assign(size_t(pages), std::vector<uint64_t>(kLayers, 0));
    }
  }

  SeedReport Run(int rooms) {
    for (int i = 0; i < rooms; ++i) At(Nanos(random_.Below(4000)) * kMs, [this] { NewRoom(); });
    for (Nanos t = 0; t < 60000 * kMs; t += 100 * kMs) At(t, [this] { Beat(); });
    while (!events_.empty() && !journal_.failed()) {
      journal_.CountEvent();
      auto [at, fn] = std::pair(events_.top().at, events_.top().fn);
      events_.pop();
      now_ = at;
      if (now_ > 12000 * kMs) faults_ = {};  // faults end, everything must settle
      fn();
      Drain();
    }
    if (journal_.failed()) return Report();
    for (size_t d = 0; d < decode_.size(); ++d) {
      Expect(decode_[d].rooms->active() == 0, "decode has active rooms at the end");
      Expect(decode_[d].rooms->stats().leased_pages == 0, "decode counts leased pages at the end");
      for (const RoomId lease : decode_[d].lease) Expect(lease == 0, "a decode page is leased at the end");
    }
    for (PrefillSide& p : prefill_) {
      Expect(p.rooms->active() == 0, "prefill has active rooms at the end");
      Expect(p.rooms->outstanding_writes() == 0, "writes are outstanding at the end");
    }
    for (const auto& [id, room] : rooms_) {
      Expect(room.decode_ended == 1, "a room ended not exactly once on decode");
      Expect(room.ready + room.failed == 1, "a client got not exactly one outcome");
      if (only_cuts_ && cuts_ == 1)
        Expect(room.ready == 1, "a room did not outlive its connection although both sides did: " + room.why);
    }
    return Report();
  }

 private:
  struct Event {
    Nanos at;
    int64_t seq;
    std::function<void()> fn;
    bool operator<(const Event& o) const { return at != o.at ? at > o.at : seq > o.seq; }
  };
  struct PrefillSide {
    std::unique_ptr<PrefillRooms> rooms;
    int32_t lanes = 1;
    uint64_t epoch = 0;
    Nanos stopped_until = 0;
    std::map<RoomId, std::vector<PageId>> source;           // of a running room, by ordinal
    std::map<int32_t, std::pair<RoomId, int32_t>> content;  // page -> whose row it holds
    std::vector<std::vector<PageId>> free;                  // by lane
    std::vector<int32_t> made;                              // pages there are, by lane
    struct UnderWay {
      PeerId peer;
      std::vector<Nanos> landed;  // when each of its layers has, if nothing stops it
    };
    std::map<WriteId, UnderWay> under_way;
    std::set<RoomId> running;
    std::vector<std::tuple<RoomId, int64_t, bool>> pending;  // room, start, first: for the next forward
    bool planned = false;
  };
  struct DecodeSide {
    std::unique_ptr<DecodeRooms> rooms;
    int32_t lanes = 1;
    std::vector<RoomId> lease;                  // page -> room, 0 free
    std::vector<std::vector<uint64_t>> memory;  // place of a page x layer
    // Where a page lies: the ranks' memories in a row.
    std::vector<uint64_t>& At(PageId page) {
      const size_t each = memory.size() / size_t(lanes);
      return memory[size_t(PageOwner(page, lanes)) * each + size_t(PageLocal(page, lanes))];
    }
    std::map<int, Nanos> last_beat;
    std::map<int, bool> lost;
  };
  struct RoomState {
    int prefill = 0, decode = 0;
    int64_t tokens = 0;
    int32_t first_page = 0;
    std::vector<PageId> pages;
    int ready = 0, failed = 0, decode_ended = 0;
    std::string why;  // it failed
  };

  // Both sides name the same connection: side index in the low bits, the connection's number above.
  PeerId Peer(int side, int p) const { return PeerId(connection_.at(p) * 16 + side); }

  SeedReport Report() {
    journal_.Cover("rooms_ready", ready_);
    journal_.Cover("rooms_failed", failed_);
    journal_.Cover("crashes", crashes_);
    journal_.Cover("connections_cut", cuts_);
    journal_.Cover("rooms_reused", reused_);
    for (const DecodeSide& d : decode_) {
      journal_.Cover("aborts_sent", d.rooms->stats().aborts_sent);
      journal_.Cover("fences", d.rooms->stats().fences);
      journal_.Cover("late_frames", d.rooms->stats().late_frames);
      if (quiet_ && !journal_.failed())
        Expect(d.rooms->stats().fences == 0, "a connection was cut although everybody answers");
    }
    for (const PrefillSide& p : prefill_) {
      journal_.Cover("layers_sent_at_end", p.rooms->stats().layers_sent_at_end);
      journal_.Cover("early_reservations", p.rooms->stats().early_reservations);
      journal_.Cover("write_retries", p.rooms->stats().write_retries);
      journal_.Cover("rooms_resumed", p.rooms->stats().resumes);
      journal_.Cover("monolithic_by_fault", p.rooms->stats().rooms_by_fault);
      journal_.Cover("fences_by_prefill", p.rooms->stats().fences);
    }
    return journal_.report();
  }
  void Expect(bool ok, const std::string& what) {
    if (!ok) journal_.Violation("{}", what);
  }
  void At(Nanos t, std::function<void()> fn) { events_.push({std::max(t, now_), seq_++, std::move(fn)}); }

  void StartPrefill(int i) {
    prefill_[i].epoch = ++epochs_;
    RoomOptions o = options_;
    o.epoch = prefill_[i].epoch;
    o.lanes = prefill_[i].lanes;
    prefill_[i].rooms = std::make_unique<PrefillRooms>(layout_, o);
    prefill_[i].running.clear();
    prefill_[i].pending.clear();
    prefill_[i].source.clear();
    prefill_[i].content.clear();
    prefill_[i].under_way.clear();
    prefill_[i].free.assign(size_t(o.lanes), {});
    prefill_[i].made.assign(size_t(o.lanes), 0);
    ++connection_[i];
  }

  void NewRoom() {
    const RoomId id = ++last_room_;
    RoomState& r = rooms_[id];
    r.prefill = int(random_.Below(prefill_.size()));
    r.decode = int(random_.Below(decode_.size()));
    r.tokens = int64_t(1 + random_.Below(900));
    r.first_page = int32_t(random_.Below(uint64_t(CeilDiv(r.tokens, kPageTokens)) + 1));
    DecodeSide& d = decode_[r.decode];
    const int32_t need = RequestPages(r.tokens, r.first_page).size();
    for (int32_t i = 0; i < need; ++i) {  // each from the rank that its place in the prompt belongs to
      const int32_t lane = (r.first_page + i) % d.lanes;
      for (int32_t p = lane; p < int32_t(d.lease.size()); p += d.lanes) {
        if (d.lease[p] != 0 || std::find(r.pages.begin(), r.pages.end(), PageId(p)) != r.pages.end())
          continue;
        r.pages.push_back(PageId(p));
        break;
      }
    }
    if (int32_t(r.pages.size()) < need) {
      rooms_.erase(
          id);  // no room in the pool: the request waits in the queue, which is not this table's business
      return;
    }
    for (const PageId p : r.pages) d.lease[p.value] = id;
    const Digest256 digest = Digest256{uint8_t(id)};
    const int prefill = r.prefill, decode = r.decode;
    const int64_t tokens = r.tokens;
    Expect(d.rooms
               ->Open(id, Peer(prefill, prefill), prefill_[prefill].epoch, tokens, digest, r.first_page,
                      r.pages, now_)
               .ok(),
           "open refused");
    Expect(!d.rooms->Open(id, Peer(prefill, prefill), 0, tokens, digest, r.first_page, r.pages, now_).ok(),
           "a duplicate room was taken");
    // The router knows an address, not who answers there now.
    At(now_ + Nanos(random_.Below(300)) * kMs,
       [=, this] { (void)prefill_[prefill].rooms->Add(id, tokens, digest, now_); });
    if (random_.Chance(faults_.abort))
      At(now_ + Nanos(random_.Below(2500)) * kMs,
         [=, this] { decode_[decode].rooms->Cancel(id, Aborted("client left"), now_); });
    if (random_.Chance(faults_.abort * 0.5))
      At(now_ + Nanos(random_.Below(2500)) * kMs,
         [=, this] { prefill_[prefill].rooms->Cancel(id, Aborted("prefill side"), now_); });
  }

  void Beat() {
    for (size_t p = 0; p < prefill_.size(); ++p) {
      if (random_.Chance(faults_.crash)) Crash(int(p));
      if (random_.Chance(faults_.cut)) Break(int(p), 300 * kMs);
      if (random_.Chance(faults_.stop)) prefill_[p].stopped_until = now_ + Nanos(random_.Below(4000)) * kMs;
      if (now_ < prefill_[p].stopped_until) continue;
      prefill_[p].rooms->Tick(now_);
      for (size_t d = 0; d < decode_.size(); ++d)
        Send(int(p), int(d), false, prefill_[p].rooms->BeatFor(Peer(int(d), int(p)), prefill_[p].epoch, 0));
    }
    for (size_t d = 0; d < decode_.size(); ++d) {
      decode_[d].rooms->Tick(now_);
      for (size_t p = 0; p < prefill_.size(); ++p) {
        Nanos& last = decode_[d].last_beat[int(p)];
        if (last != 0 && now_ - last > 1000 * kMs) {
          last = now_;
          decode_[d].rooms->OnPeerLost(Peer(int(p), int(p)), Unavailable("heartbeat missing"), false, now_);
        }
      }
    }
  }

  void Crash(int p) {
    ++crashes_;
    const PeerId old = Peer(p, p);
    StartPrefill(p);  // a new process answers at the address; writes of the old one died with it
    for (size_t d = 0; d < decode_.size(); ++d) {
      const bool refused = random_.Chance(0.5);  // or it answers again by the time decode asks
      At(now_ + kMs, [=, this] {
        if (refused) return decode_[d].rooms->OnPeerLost(old, Unavailable("connection reset"), true, now_);
        decode_[d].rooms->OnPeerCut(old, Unavailable("connection reset"), now_);
        At(now_ + Nanos(random_.Below(1000)) * kMs, [=, this] { Reconnect(p, int(d)); });
      });
    }
  }

  // The connections of an instance end and the instances do not. Each side learns of it in its own time;
  // until decode does, what was sent may land.
  void Break(int p, Nanos notice) {
    ++cuts_;
    const int old = connection_[p]++;
    const uint64_t epoch = prefill_[p].epoch;
    for (size_t d = 0; d < decode_.size(); ++d) {
      At(now_ + Nanos(random_.Below(uint64_t(notice / kMs) + 1)) * kMs, [=, this] {
        cut_.try_emplace({p, old, int(d)}, now_);
        decode_[d].last_beat[p] = now_;
        decode_[d].rooms->OnPeerCut(PeerId(old * 16 + p), Unavailable("the connection broke"), now_);
        const Nanos latest = only_cuts_ ? 800 : 2000;  // some come too late
        At(now_ + Nanos(random_.Below(latest)) * kMs, [=, this] { Reconnect(p, int(d)); });
      });
      At(std::max(now_ + Nanos(random_.Below(1000)) * kMs, prefill_[p].stopped_until), [=, this] {
        if (Alive(p, epoch)) Lose(p, PeerId(old * 16 + int(d)), Unavailable("the connection broke"), true);
      });
    }
  }

  // Decode reaches the address again and asks for what it waits for there.
  void Reconnect(int p, int d) {
    if (now_ < prefill_[p].stopped_until)
      return At(prefill_[p].stopped_until, [=, this] { Reconnect(p, d); });
    decode_[d].last_beat[p] = now_;
    for (const auto& [id, room] : rooms_)
      if (room.prefill == p && room.decode == d && decode_[d].rooms->IsCut(id))
        decode_[d].rooms->Resume(id, Peer(p, p), prefill_[p].epoch, now_);
  }

  void Send(int p, int d, bool to_prefill, const ControlMessage& m) {
    const int copies = random_.Chance(faults_.drop) ? 0 : random_.Chance(faults_.duplicate) ? 2 : 1;
    const auto bytes = Encode(m);
    const int connection = connection_[p];
    for (int i = 0; i < copies; ++i) {
      const Nanos latency = random_.Chance(faults_.delay) ? Nanos(random_.Below(1500)) * kMs : kMs;
      At(now_ + latency, [=, this] { Deliver(p, d, to_prefill, connection, bytes); });
    }
  }
  void Deliver(int p, int d, bool to_prefill, int connection, const std::vector<std::byte>& bytes) {
    const auto got = Decode(bytes);
    Expect(got.ok(), "a frame did not decode");
    if (connection != connection_[p]) {
      // The connection is closed. A reservation may reach the next instance all the same (a proxy sends it
      // again).
      const auto* reserve = std::get_if<Reserve>(&*got);
      if (!to_prefill || reserve == nullptr || now_ < prefill_[p].stopped_until ||
          reserve->epoch == prefill_[p].epoch)
        return;
      prefill_[p].rooms->OnFrame(Peer(d, p), *got, now_);
      return;
    }
    if (to_prefill) {
      if (now_ < prefill_[p].stopped_until) {
        At(prefill_[p].stopped_until, [=, this] { Deliver(p, d, to_prefill, connection, bytes); });
        return;
      }
      const auto* reserve = std::get_if<Reserve>(&*got);
      const auto* abort = std::get_if<Abort>(&*got);
      if (reserve != nullptr || abort != nullptr) {
        const PeerId before = prefill_[p].rooms->PeerOf(reserve != nullptr ? reserve->room : abort->room);
        if (before.valid() && before != Peer(d, p) && before.value % 16 == d)
          Lose(p, before, Unavailable("it came back on another connection"), true);
      }
      prefill_[p].rooms->OnFrame(Peer(d, p), *got, now_);
    } else {
      decode_[d].last_beat[p] = now_;
      decode_[d].rooms->OnFrame(Peer(p, p), *got, now_);
    }
  }

  void Drain() {
    for (size_t p = 0; p < prefill_.size(); ++p)
      for (Action& a : prefill_[p].rooms->TakeActions()) OnPrefillAction(int(p), a);
    for (size_t d = 0; d < decode_.size(); ++d)
      for (Action& a : decode_[d].rooms->TakeActions()) OnDecodeAction(int(d), a);
  }

  void OnPrefillAction(int p, Action& action) {
    if (auto* send = std::get_if<SendFrame>(&action)) {
      if (send->peer.value / 16 == connection_[p]) Send(p, send->peer.value % 16, false, send->message);
    } else if (auto* ready_room = std::get_if<RoomReady>(&action)) {
      const RoomId id = ready_room->room;
      const uint64_t epoch = prefill_[p].epoch;
      prefill_[p].running.insert(id);
      TakeSource(prefill_[p], id);
      const int64_t cached =
          int64_t(random_.Below(uint64_t((rooms_.at(id).tokens - 1) / kPageTokens) + 1)) * kPageTokens;
      At(now_ + Nanos(random_.Below(500)) * kMs, [=, this] { Plan(p, epoch, id, cached, true); });
    } else if (auto* write = std::get_if<PostWrite>(&action)) {
      StartWrite(p, *write);
    } else if (auto* fence = std::get_if<FencePeer>(&action)) {
      Cut(p, fence->peer.value / 16);
    } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
      prefill_[p].running.erase(ended->room);
      GiveSource(prefill_[p], ended->room);
      ended_on_prefill_.insert({p, prefill_[p].epoch, ended->room});
      // A client that chose the same number again.
      const RoomId id = ended->room;
      const uint64_t epoch = prefill_[p].epoch;
      if (random_.Chance(0.3))
        At(now_ + Nanos(random_.Below(5000)) * kMs, [=, this] {
          if (!Alive(p, epoch)) return;
          ++reused_;
          Expect(!prefill_[p].rooms->Add(id, 64, {}, now_).ok(),
                 "the number of a room that has just ended was taken again");
        });
    }
  }

  void TakeSource(PrefillSide& p, RoomId id) {
    std::vector<PageId>& pages = p.source[id];
    for (int32_t i = 0; i < int32_t(CeilDiv(rooms_.at(id).tokens, kPageTokens)); ++i) {
      const int32_t lane = i % p.lanes;
      std::vector<PageId>& free = p.free[size_t(lane)];
      if (free.empty()) free.push_back(PageId(p.made[size_t(lane)]++ * p.lanes + lane));
      pages.push_back(free.back());
      free.pop_back();
      p.content[pages.back().value] = {id, i};
    }
    for (int32_t lane = int32_t(pages.size()); lane < p.lanes; ++lane) journal_.Cover("ranks_without_pages");
  }
  void GiveSource(PrefillSide& p, RoomId id) {
    const auto it = p.source.find(id);
    if (it == p.source.end()) return;
    for (const PageId page : it->second) {
      p.content.erase(page.value);
      p.free[size_t(PageOwner(page, p.lanes))].push_back(page);
    }
    p.source.erase(it);
  }

  bool Alive(int p, uint64_t epoch) const { return prefill_[p].epoch == epoch; }

  // Rooms that are due within a moment share a forward.
  void Plan(int p, uint64_t epoch, RoomId id, int64_t start, bool first) {
    if (!Alive(p, epoch)) return;
    prefill_[p].pending.push_back({id, start, first});
    if (std::exchange(prefill_[p].planned, true)) return;
    At(now_ + Nanos(random_.Below(60)) * kMs, [=, this] {
      prefill_[p].planned = false;
      Forward(p, prefill_[p].epoch);
    });
  }

  void Forward(int p, uint64_t epoch) {
    if (!Alive(p, epoch)) return;
    if (now_ < prefill_[p].stopped_until)
      return At(prefill_[p].stopped_until, [=, this] { Forward(p, epoch); });
    const int64_t step = ++steps_;
    struct Part {
      RoomId id;
      Chunk chunk;
    };
    std::vector<Part> parts;
    for (const auto& [id, start, first] : std::exchange(prefill_[p].pending, {})) {
      if (!prefill_[p].running.contains(id)) continue;  // the scheduler drops an ended room's request
      const RoomState& r = rooms_.at(id);
      const int64_t end = std::min<int64_t>(r.tokens, start + 1 + int64_t(random_.Below(300)));
      std::vector<PageId> source = prefill_[p].source.at(id);
      const Chunk chunk{start, end, first, end == r.tokens};
      if (chunk.last ? false : random_.Chance(faults_.registration))
        source.resize(random_.Below(source.size()));  // may be too short for the chunk
      prefill_[p].rooms->BeginForward(step, id, chunk, source, now_);
      prefill_[p].rooms->BeginForward(step, id, chunk, source,
                                      now_);  // batch forming visits a request several times
      parts.push_back({id, chunk});
    }
    if (parts.empty()) return;
    if (parts.size() > 1) journal_.Cover("shared_forwards");
    Nanos at = now_;
    for (int layer = 0; layer < kLayers - 1; ++layer) {
      at += Nanos(random_.Below(20)) * kMs;
      const int repeats = random_.Chance(0.1) ? 2 : 1;
      for (int k = 0; k < repeats; ++k)
        At(at, [=, this] {
          if (Alive(p, epoch)) prefill_[p].rooms->OnLayerFinal(step, LogicalLayer(layer), now_);
        });
    }
    At(at + kMs, [=, this] {
      if (!Alive(p, epoch)) return;
      const bool bad = random_.Chance(faults_.write_error * 0.2);
      prefill_[p].rooms->EndForward(step, bad ? Unavailable("device error") : OkStatus(), now_);
      for (const Part& part : parts) {
        if (bad) continue;
        if (part.chunk.last) {
          prefill_[p].rooms->SetAux(part.id, AuxOf(part.id), now_);
        } else {
          At(now_ + kMs, [=, this] { Plan(p, epoch, part.id, part.chunk.end, false); });
        }
      }
    });
  }

  static Aux AuxOf(RoomId id) {
    Aux aux;
    aux.first_token = int32_t(id);
    aux.logprob = float(id) + 0.5f;
    aux.cached_device = int32_t(id * 7 + 1);
    aux.cached_host = int32_t(id * 7 + 2);
    aux.cached_storage = int32_t(id * 7 + 3);
    aux.logits_hash = id * 7 + 4;
    aux.draft_tokens = {int32_t(id * 7 + 5)};
    aux.draft_hidden = {float(id * 7 + 6)};
    return aux;
  }

  void StartWrite(int p, const PostWrite& write) {
    const uint64_t epoch = prefill_[p].epoch;
    const int connection = write.peer.value / 16;
    const int d = write.peer.value % 16;
    Nanos at = now_;
    PrefillSide::UnderWay& under_way = prefill_[p].under_way[write.id];
    under_way.peer = write.peer;
    for (const LogicalLayer layer : write.layers) {
      for (const PageMove& move : write.pages) {
        at += Nanos(random_.Below(3)) * kMs;
        At(at, [=, this] { Land(p, epoch, connection, d, write.room, layer.value, move); });
      }
      under_way.landed.push_back(at);
    }
    const bool error = random_.Chance(faults_.write_error);
    for (const PageMove& move : write.pages)
      Expect(PageOwner(move.from, prefill_[p].lanes) == PageOwner(write.pages[0].from, prefill_[p].lanes),
             "a rank wrote a page that another one owns");
    if (random_.Chance(faults_.hang)) return;  // its end never comes; cutting the connection ends it
    At(at + kMs, [=, this] {
      if (!Alive(p, epoch) || !prefill_[p].under_way.contains(write.id)) return;
      if (cut_.contains({p, connection, d})) return Lose(p, write.peer, Unavailable("reset"), true);
      const bool failed = error;
      const int32_t arrived = failed ? Acknowledged(p, prefill_[p].under_way.at(write.id)) : 0;
      prefill_[p].under_way.erase(write.id);
      prefill_[p].rooms->OnWriteDone(write.id, failed ? Unavailable("write failed") : OkStatus(), now_,
                                     arrived);
    });
  }

  // Of the layers of a failed write that landed: as many as decode could still say.
  int32_t Acknowledged(int p, const PrefillSide::UnderWay& write) {
    const auto cut = cut_.find({p, write.peer.value / 16, write.peer.value % 16});
    const Nanos until = cut == cut_.end() ? now_ : std::min(now_, cut->second);
    uint64_t landed = 0;
    for (const Nanos at : write.landed) landed += at < until;
    return int32_t(random_.Below(landed + 1));
  }

  void Land(int p, uint64_t epoch, int connection, int d, RoomId room, int layer, const PageMove& move) {
    if (!Alive(p, epoch) || cut_.contains({p, connection, d}) ||
        lost_.contains({p, epoch, connection * 16 + d}))
      return;
    Expect(!ended_on_prefill_.contains({p, epoch, room}),
           "a write read the source pages of a room that ended on prefill");
    Expect(decode_[d].lease[move.to.value] == room, "a write landed on a page that decode had taken back");
    const auto source = prefill_[p].content.find(move.from.value);
    if (source == prefill_[p].content.end()) return;
    decode_[d].At(move.to)[size_t(layer)] = RowValue(source->second.first, source->second.second, layer);
  }

  // Prefill lets a peer go: nothing of its own reaches it any more, and its writes have failed.
  void Lose(int p, PeerId peer, const Status& why, bool may_return) {
    if (may_return) {
      prefill_[p].rooms->OnPeerCut(peer, why, now_);
    } else {
      prefill_[p].rooms->OnPeerLost(peer, why, now_);
    }
    std::vector<WriteId> failed;
    for (const auto& [id, write] : prefill_[p].under_way)
      if (write.peer == peer) failed.push_back(id);
    for (const WriteId id : failed) {
      const int32_t arrived = Acknowledged(p, prefill_[p].under_way.at(id));
      prefill_[p].under_way.erase(id);
      prefill_[p].rooms->OnWriteDone(id, Unavailable("the connection was cut"), now_, arrived);
    }
    lost_.insert({p, prefill_[p].epoch, peer.value});  // nothing of it is sent any more
  }

  // Cutting a connection closes it for every decode of this small world; both ends learn of it.
  void Cut(int p, int connection) {
    if (connection == connection_[p]) Break(p, 0);
  }

  void OnDecodeAction(int d, Action& action) {
    if (auto* send = std::get_if<SendFrame>(&action)) {
      if (send->peer.value / 16 == connection_[send->peer.value % 16])
        Send(send->peer.value % 16, d, true, send->message);
    } else if (auto* r = std::get_if<RoomReady>(&action)) {
      RoomState& room = rooms_.at(r->room);
      ++room.ready;
      ++ready_;
      Expect(r->aux == AuxOf(r->room), "aux data of another room or in another place");
      for (size_t i = 0; i < room.pages.size(); ++i)
        for (int layer = 0; layer < kLayers; ++layer)
          Expect(decode_[d].At(room.pages[i])[size_t(layer)] ==
                     RowValue(r->room, room.first_page + int32_t(i), layer),
                 "a room is ready with rows that are not its own");
    } else if (auto* f = std::get_if<RoomFailed>(&action)) {
      ++rooms_.at(f->room).failed;
      rooms_.at(f->room).why = std::string(Message(f->status));
      ++failed_;
      Expect(!f->status.ok(), "failed without a reason");
      // Peers, networks and clients fail in their own ways; this is ours.
      Expect(!absl::IsInternal(f->status),
             "decode refused what prefill declared whole: " + std::string(Message(f->status)));
    } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
      RoomState& room = rooms_.at(ended->room);
      ++room.decode_ended;
      for (const PageId p : room.pages) {
        Expect(decode_[d].lease[p.value] == ended->room, "a page was given back twice");
        decode_[d].lease[p.value] = 0;
      }
    } else if (auto* fence = std::get_if<FencePeer>(&action)) {
      const int p = fence->peer.value % 16, connection = fence->peer.value / 16;
      const PeerId at_decode = fence->peer;
      At(now_ + Nanos(random_.Below(100)) * kMs, [=, this] {
        if (connection != connection_[p]) {  // broken already, which decode may not know: it closes its end
          cut_.try_emplace({p, connection, d}, now_);
          return decode_[d].rooms->OnPeerCut(at_decode, Unavailable("it did not answer"), now_);
        }
        Cut(p, connection);
      });
    }
  }

  Journal journal_;
  SeededStream random_;
  Faults faults_;
  KvLayout layout_;
  RoomOptions options_;
  Nanos now_ = 0;
  int64_t seq_ = 0, steps_ = 0;
  uint64_t epochs_ = 0;
  RoomId last_room_ = 0;
  std::priority_queue<Event> events_;
  std::vector<PrefillSide> prefill_;
  std::vector<DecodeSide> decode_;
  std::map<RoomId, RoomState> rooms_;
  std::map<int, int> connection_;
  std::map<std::tuple<int, int, int>, Nanos> cut_;     // prefill, connection, decode: when decode closed it
  std::set<std::tuple<int, uint64_t, int32_t>> lost_;  // prefill, epoch, peer
  std::set<std::tuple<int, uint64_t, RoomId>> ended_on_prefill_;
  bool quiet_ = false;      // no fault of the network or of an instance in this seed
  bool only_cuts_ = false;  // none but connections that break, and nobody leaves
  int32_t pool_pages_ = 0;
  int64_t ready_ = 0, failed_ = 0, crashes_ = 0, cuts_ = 0, reused_ = 0;
};

}  // namespace

SeedReport RunPdSeed(uint64_t seed, bool trace) {
  PdWorld world(seed, trace, 2, 2, false);
  return world.Run(14);
}

SeedReport RunPdCpSeed(uint64_t seed, bool trace) {
  PdWorld world(seed, trace, 2, 2, true);
  return world.Run(14);
}

}  // namespace sluice::sim
