// sluice bench radix: prefix match and insert against memcmp and memcpy of the same bytes, in one run.
//
// Every figure is a median of rounds that alternate between the tree and the plain call, so both see the same
// machine.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>

#include "allocation_counter.h"
#include "base/random.h"
#include "commands.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "radix/radix_tree.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kPage = 64;

struct Options {
  int64_t tokens = 65536;
  int rounds = 15;
  int64_t other_paths = 1000;  // touched before a cold match
  int64_t resident_nodes = 1000000;
  bool check = false;
  std::string json;
};

double Now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + int64_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Microseconds of one call, the call repeated so that the clock does not show.
template <typename F>
double Time(int repeat, F&& f) {
  const double t = Now();
  for (int i = 0; i < repeat; ++i) f();
  return (Now() - t) / repeat;
}

volatile int64_t sink;

std::vector<int32_t> RandomTokens(int64_t n, uint64_t seed) {
  SeededStream random(seed);
  std::vector<int32_t> t(static_cast<size_t>(n));
  for (int32_t& x : t) x = int32_t(random.Below(150000));
  return t;
}

struct Slots {
  std::vector<int32_t> ids;
  int32_t next = 0;
  std::span<const int32_t> Take(int64_t n) {
    ids.resize(size_t(n));
    std::iota(ids.begin(), ids.end(), next);
    next += int32_t(n);
    return ids;
  }
};

// A path of `nodes` nodes of equal length; returns its last node.
RadixNode* AddPath(RadixTree& tree, RadixNode* from, RadixKey key, int64_t nodes, Slots* slots) {
  const int64_t pages = key.pages() / nodes;
  RadixNode* at = from;
  for (int64_t i = 0; i < nodes; ++i) {
    at = tree.AddChild(at, key.Slice(i * pages, i + 1 == nodes ? key.pages() : (i + 1) * pages));
    tree.AddResident(at, Tier::kDevice, slots->Take(at->pages));
  }
  return at;
}

struct Row {
  int64_t nodes = 0;
  double match_us = 0, memcmp_us = 0, insert_us = 0, insert_new_us = 0, split_us = 0, memcpy_us = 0,
         cold_match_us = 0, cold_memcmp_us = 0, lock_unlock_us = 0;
  int64_t allocations = 0;
};

Row MeasurePath(const Options& o, int64_t nodes) {
  Row row;
  row.nodes = nodes;
  RadixTree tree({.page_tokens = kPage});
  Slots slots;
  RadixNode* root = tree.GetRoot("");
  const std::vector<int32_t> ask = RandomTokens(o.tokens, 1), copy = ask;
  const RadixKey key(ask, kPage);
  RadixNode* leaf = AddPath(tree, root, key, nodes, &slots);
  std::vector<std::vector<int32_t>> others;
  for (int64_t i = 0; i < o.other_paths; ++i) {
    others.push_back(RandomTokens(o.tokens, 100 + uint64_t(i)));
    AddPath(tree, root, RadixKey(others.back(), kPage), nodes, &slots);
  }
  auto match = [&] { sink = tree.Walk(root, key).pages; };
  auto compare = [&] { sink = std::memcmp(ask.data(), copy.data(), ask.size() * 4); };
  match();
  const int64_t before = ThreadAllocations();
  match();
  row.allocations = ThreadAllocations() - before;
  SLUICE_CHECK(sink == key.pages());

  std::vector<double> m, c, r, n, s, y, l;
  std::vector<int32_t> target(ask.size());
  for (int i = 0; i < o.rounds; ++i) {
    c.push_back(Time(40, compare));
    m.push_back(Time(40, match));
    r.push_back(Time(40, [&] {
      // Insert of what is there: walk, refresh the path's age, move the lock.
      const RadixTree::Match found = tree.Walk(root, key);
      tree.TouchPath(found.node);
      tree.Lock(found.node);
      tree.Unlock(found.node);
    }));
    l.push_back(Time(1000, [&] {
      tree.Lock(leaf);
      tree.Unlock(leaf);
    }));
  }
  for (int i = 0; i < o.rounds; ++i) {
    std::vector<int32_t> fresh = RandomTokens(o.tokens, 1000000 + uint64_t(i));
    y.push_back(Time(1, [&] { std::memcpy(target.data(), fresh.data(), fresh.size() * 4); }));
    const auto ids = slots.Take(key.pages());
    RadixNode* added = nullptr;
    n.push_back(Time(1, [&] {
      added = tree.AddChild(root, RadixKey(fresh, kPage));
      tree.AddResident(added, Tier::kDevice, ids);
    }));
    s.push_back(Time(1, [&] { tree.Split(added, added->pages / 2); }));
  }
  if (o.other_paths > 0) {
    std::vector<double> cold, cold_cmp;
    for (int i = 0; i < o.rounds; ++i) {  // the first call after everything else went through the caches
      for (const auto& t : others) sink = tree.Walk(root, RadixKey(t, kPage)).pages;
      cold.push_back(Time(1, match));
      for (const auto& t : others) sink = tree.Walk(root, RadixKey(t, kPage)).pages;
      cold_cmp.push_back(Time(1, compare));
    }
    row.cold_match_us = Median(cold);
    row.cold_memcmp_us = Median(cold_cmp);
  }
  row.match_us = Median(m);
  row.memcmp_us = Median(c);
  row.insert_us = Median(r);
  row.insert_new_us = Median(n);
  row.split_us = Median(s);
  row.memcpy_us = Median(y);
  row.lock_unlock_us = Median(l);
  return row;
}

// 1000 random first-page misses on a tree of 100,000 nodes below one root.
double MeasureMiss(const Options& o) {
  RadixTree tree({.page_tokens = kPage});
  Slots slots;
  RadixNode* root = tree.GetRoot("");
  for (uint64_t i = 0; i < 100000; ++i)
    AddPath(tree, root, RadixKey(RandomTokens(kPage, i), kPage), 1, &slots);
  std::vector<std::vector<int32_t>> asks;
  for (uint64_t i = 0; i < 1000; ++i) asks.push_back(RandomTokens(kPage, (1ull << 40) + i));
  std::vector<double> v;
  for (int r = 0; r < o.rounds; ++r) {
    v.push_back(Time(1,
                     [&] {
                       for (const auto& a : asks) sink = tree.Walk(root, RadixKey(a, kPage)).pages;
                     }) /
                double(asks.size()));
  }
  return Median(v);
}

// The page after a prefix of 1M tokens, found from the sequence's cursor.
double MeasureCursor(const Options& o) {
  RadixTree tree({.page_tokens = kPage});
  Slots slots;
  RadixNode* root = tree.GetRoot("");
  const auto prefix = RandomTokens(1 << 20, 5), tail = RandomTokens(kPage, 6);
  RadixNode* end = AddPath(tree, root, RadixKey(prefix, kPage), 512, &slots);
  AddPath(tree, end, RadixKey(tail, kPage), 1, &slots);
  std::vector<double> v;
  for (int r = 0; r < o.rounds; ++r) {
    v.push_back(Time(1000, [&] { sink = tree.Walk(end, RadixKey(tail, kPage)).pages; }));
  }
  SLUICE_CHECK(sink == 1);
  return Median(v);
}

struct Resident {
  int64_t nodes = 0;
  double build_us_per_node = 0, hit_us = 0, evict_us_per_leaf = 0, bytes_per_node = 0;
};

int64_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * 4096;
}

// A million nodes: random two-page hits among them, and eviction in mixed LRU order.
Resident MeasureResident(const Options& o) {
  Resident res;
  res.nodes = o.resident_nodes;
  RadixTree tree({.page_tokens = kPage});
  Slots slots;
  RadixNode* root = tree.GetRoot("");
  std::vector<RadixNode*> all;
  all.reserve(size_t(o.resident_nodes));
  SeededStream random(9);
  std::vector<int32_t> page(kPage);
  const int64_t bytes = ResidentBytes();
  const double t = Now();
  for (int64_t i = 0; i < o.resident_nodes; ++i) {
    std::fill(page.begin(), page.end(), int32_t(i));
    RadixNode* parent = i < 1000 || random.Chance(0.1) ? root : all[random.Below(all.size())];
    all.push_back(AddPath(tree, parent, RadixKey(page, kPage), 1, &slots));
  }
  res.build_us_per_node = (Now() - t) / double(o.resident_nodes);
  res.bytes_per_node = double(ResidentBytes() - bytes) / double(o.resident_nodes);
  for (int64_t i = 0; i < o.resident_nodes / 10; ++i) tree.Touch(all[random.Below(all.size())]);
  std::vector<double> hit;
  std::vector<std::vector<int32_t>> asks;
  for (int i = 0; i < 1000; ++i) {
    const RadixNode* n = all[random.Below(1000)];
    asks.emplace_back(n->tokens, n->tokens + kPage);
  }
  for (int r = 0; r < o.rounds; ++r) {
    hit.push_back(Time(1,
                       [&] {
                         for (const auto& a : asks) sink = tree.Walk(root, RadixKey(a, kPage)).pages;
                       }) /
                  double(asks.size()));
  }
  res.hit_us = Median(hit);
  std::vector<double> evict;
  const int64_t per_round = std::min<int64_t>(1000, o.resident_nodes / (2 * o.rounds));
  for (int r = 0; r < o.rounds; ++r) {
    evict.push_back(Time(1,
                         [&] {
                           for (int64_t i = 0; i < per_round; ++i) {
                             RadixNode* v = tree.Victim(Tier::kDevice);
                             tree.DropResident(v, Tier::kDevice, 1, [](int32_t) {});
                           }
                         }) /
                    double(per_round));
  }
  res.evict_us_per_leaf = Median(evict);
  return res;
}

int Run(const Options& o) {
  Json doc;
  doc["tokens"] = o.tokens;
  doc["page_size"] = kPage;
  doc["rounds"] = o.rounds;
  Json rows = Json::array();
  std::vector<std::string> failed;
  std::string table =
      fmt::format("{:>6} {:>9} {:>10} {:>6} {:>6} {:>10} {:>11} {:>10} {:>10} {:>8}\n", "nodes", "match us",
                  "memcmp us", "ratio", "alloc", "insert us", "new/memcpy", "cold us", "cold cmp", "lock us");
  for (const int64_t nodes : {1, 16, 128, 1024}) {
    if (nodes > o.tokens / kPage) continue;
    const Row r = MeasurePath(o, nodes);
    const double ratio = r.match_us / r.memcmp_us;
    rows.push_back(Json{{"tokens", o.tokens},
                        {"page_size", kPage},
                        {"nodes", nodes},
                        {"match_us", r.match_us},
                        {"insert_us", r.insert_us},
                        {"memcmp_us", r.memcmp_us},
                        {"ratio", ratio},
                        {"allocations", r.allocations},
                        {"cold_match_us", r.cold_match_us},
                        {"cold_memcmp_us", r.cold_memcmp_us},
                        {"ns_per_node_beyond_memcmp", (r.match_us - r.memcmp_us) * 1000 / double(nodes)},
                        {"insert_new_us", r.insert_new_us},
                        {"split_us", r.split_us},
                        {"memcpy_us", r.memcpy_us},
                        {"lock_unlock_us", r.lock_unlock_us}});
    table += fmt::format(
        "{:>6} {:>9.2f} {:>10.2f} {:>6.2f} {:>6} {:>10.2f} {:>11.2f} {:>10.1f} {:>10.1f} {:>8.3f}\n", nodes,
        r.match_us, r.memcmp_us, ratio, r.allocations, r.insert_us, r.insert_new_us / r.memcpy_us,
        r.cold_match_us, r.cold_memcmp_us, r.lock_unlock_us);
    const double limit = nodes <= 16 ? 2.0 : nodes <= 128 ? 3.0 : 0;
    if (limit > 0 && ratio > limit)
      failed.push_back(fmt::format("match at {} nodes: {:.2f}x memcmp, limit {}x", nodes, ratio, limit));
    if (r.allocations != 0)
      failed.push_back(fmt::format("match at {} nodes allocates {} times", nodes, r.allocations));
  }
  doc["rows"] = rows;
  const double miss = MeasureMiss(o), cursor = MeasureCursor(o);
  const Resident res = MeasureResident(o);
  doc["first_page_miss_us"] = miss;
  doc["cursor_tail_match_us"] = cursor;
  doc["resident"] = Json{{"nodes", res.nodes},
                         {"build_us_per_node", res.build_us_per_node},
                         {"bytes_per_node", res.bytes_per_node},
                         {"first_level_hit_us", res.hit_us},
                         {"evict_us_per_leaf", res.evict_us_per_leaf}};
  if (miss > 0.3) failed.push_back(fmt::format("first-page miss: {:.2f} us, limit 0.3", miss));
  doc["failed"] = failed;
  if (o.json.empty()) {
    std::cout
        << table
        << fmt::format(
               "\nfirst-page miss on 100,000 nodes {:.3f} us; one page after 1M tokens by cursor {:.3f} us\n"
               "{} nodes resident: {:.0f} B a node, added in {:.2f} us, hit in {:.3f} us, evicted in {:.3f} "
               "us\n",
               miss, cursor, res.nodes, res.bytes_per_node, res.build_us_per_node, res.hit_us,
               res.evict_us_per_leaf);
    for (const std::string& f : failed) std::cout << "MISSED " << f << "\n";
  } else if (o.json == "-") {
    std::cout << doc.dump(2) << "\n";
  } else {
    std::ofstream out(o.json);
    if (!(out << doc.dump(2) << "\n"))
      return FailWith("bench radix", Unavailable("--json: cannot write {}", o.json));
  }
  return o.check && !failed.empty() ? kExitCheckFailed : kExitOk;
}

}  // namespace

int RunBenchRadix(const std::vector<std::string>& args) {
  Options o;
  CLI::App app("Prefix match and insert against memcmp and memcpy of the same bytes", "sluice bench radix");
  app.option_defaults()->always_capture_default();
  app.add_option("--tokens", o.tokens, "tokens of the matched path")
      ->check(CLI::Range(int64_t(1024), int64_t(1) << 22));
  app.add_option("--rounds", o.rounds, "alternating rounds of each measurement")->check(CLI::Range(3, 1000));
  app.add_option("--other-paths", o.other_paths, "paths touched before a cold match")
      ->check(CLI::Range(0, 100000));
  app.add_option("--resident-nodes", o.resident_nodes, "nodes of the large tree")
      ->check(CLI::Range(int64_t(2000), int64_t(100000000)));
  app.add_flag("--check", o.check, "exit 1 when a limit is missed");
  app.add_option("--json", o.json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "bench radix", args)) return *code;
  return Run(o);
}

}  // namespace sluice
