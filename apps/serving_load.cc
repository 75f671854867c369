#include "serving_load.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <numeric>

#include "base/random.h"
#include "simdjson.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<int32_t> RandomTokens(SeededStream* random, int64_t n, int32_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int32_t& id : ids) id = int32_t(random->Below(uint64_t(vocab)));
  return ids;
}

int64_t Length(SeededStream* random, int64_t longest, double ratio) {
  const int64_t shortest = std::clamp<int64_t>(int64_t(double(longest) * ratio), 1, longest);
  return shortest + int64_t(random->Below(uint64_t(longest - shortest + 1)));
}

// The field if it is there and fits; else *out is left alone.
template <typename T, typename Element>
void Read(const Element& element, T* out) {
  if (T value; element.get(value) == simdjson::SUCCESS) *out = value;
}

// Reads one answer as it comes.
class AnswerSink final : public HttpSink {
 public:
  AnswerSink(const LoadTarget& target, Clock::time_point run_start, LoadResult* result,
             std::function<void()> done)
      : target_(target), start_(Clock::now()), result_(result), done_(std::move(done)) {
    result_->start_s = std::chrono::duration<double>(start_ - run_start).count();
  }

  void OnHead(int status, const HttpHeaders&) override { status_ = status; }

  void OnData(std::string_view bytes) override {
    if (status_ != 200) {
      if (result_->error.size() < 1000) result_->error += bytes;
      return;
    }
    pending_ += bytes;
    size_t begin = 0;
    for (size_t end; (end = pending_.find("\n\n", begin)) != std::string::npos; begin = end + 2) {
      const std::string_view record = std::string_view(pending_).substr(begin, end - begin);
      if (record.starts_with("data: ")) OnRecord(record.substr(6));
    }
    pending_.erase(0, begin);
  }

  void OnEnd(Status status) override {
    result_->latency_s = Since(start_);
    if (!status.ok()) {
      result_->error = std::string(Message(status));
    } else if (status_ != 200) {
      result_->error = "HTTP " + std::to_string(status_) + ": " + result_->error;
    } else if (result_->error.empty() && !whole_) {
      result_->error = "the stream ended without [DONE]";
    }
    result_->ok = result_->error.empty();
    done_();
  }

 private:
  void OnRecord(std::string_view json) {
    if (json == "[DONE]") {
      whole_ = true;
      return;
    }
    simdjson::dom::element root;
    if (parser_.parse(json.data(), json.size()).get(root) != simdjson::SUCCESS) {
      result_->error = "a record is not JSON";
      return;
    }
    std::string_view message;
    if (root["error"]["message"].get(message) == simdjson::SUCCESS) {
      result_->error = std::string(message);
      return;
    }
    int64_t tokens = result_->output_tokens;
    if (target_.backend == LoadBackend::kNative) {
      const auto meta = root["meta_info"];
      Read(meta["completion_tokens"], &tokens);
      Read(meta["cached_tokens"], &result_->cached_tokens);
      Read(meta["spec_accept_length"], &result_->spec_accept_length);
      Read(meta["spec_verify_ct"], &result_->spec_verify_steps);
      std::string_view text;
      if (root["text"].get(text) == simdjson::SUCCESS) {
        if (!target_.incremental) result_->text.clear();
        result_->text += text;
      }
      if (simdjson::dom::array ids; root["output_ids"].get(ids) == simdjson::SUCCESS) {
        if (!target_.incremental) result_->output_ids.clear();
        for (const int64_t id : ids) result_->output_ids.push_back(int32_t(id));
      }
    } else {
      const auto choice = root["choices"].at(0);
      std::string_view text;
      if (choice["text"].get(text) == simdjson::SUCCESS ||
          choice["delta"]["content"].get(text) == simdjson::SUCCESS) {
        result_->text += text;
      }
      Read(root["usage"]["completion_tokens"], &tokens);
      Read(root["usage"]["prompt_tokens_details"]["cached_tokens"], &result_->cached_tokens);
    }
    const double now = Since(start_);
    const int64_t fresh = tokens - result_->output_tokens;
    if (fresh <= 0) return;
    int64_t intervals = fresh;
    if (result_->output_tokens == 0) {
      result_->ttft_s = now;
      --intervals;  // tokens that came together with the first have no interval of their own
      result_->itl_s.insert(result_->itl_s.end(), size_t(intervals), 0.0f);
    } else {
      result_->itl_s.insert(result_->itl_s.end(), size_t(intervals), float((now - last_) / double(fresh)));
    }
    last_ = now;
    result_->output_tokens = tokens;
  }

  const LoadTarget& target_;
  const Clock::time_point start_;
  LoadResult* const result_;
  const std::function<void()> done_;
  simdjson::dom::parser parser_;
  std::string pending_;
  int status_ = 0;
  bool whole_ = false;
  double last_ = 0;
};

HttpCall MakeCall(const LoadTarget& target, const LoadRequest& request) {
  Json body;
  std::string path;
  if (target.backend == LoadBackend::kNative) {
    path = "/generate";
    body = {{"input_ids", request.prompt},
            {"stream", true},
            {"sampling_params",
             {{"max_new_tokens", request.output_tokens},
              {"temperature", target.temperature},
              {"ignore_eos", target.ignore_eos}}}};
    if (target.incremental) body["incremental_streaming_output"] = true;
  } else {
    body = {{"model", target.model},
            {"stream", true},
            {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}},
            {"max_tokens", request.output_tokens},
            {"temperature", target.temperature},
            {"ignore_eos", target.ignore_eos}};
    if (target.backend == LoadBackend::kCompletions) {
      path = "/v1/completions";
      body["prompt"] = request.prompt;
    } else {
      path = "/v1/chat/completions";
      std::string text;  // the chat endpoint takes text: numbers, about one token or two each
      for (const int32_t id : request.prompt) text += std::to_string(id) + " ";
      body["messages"] = {{{"role", "user"}, {"content", text}}};
    }
  }
  if (target.extra_body.is_object()) body.update(target.extra_body);
  HttpCall call{.url = target.url};
  if (call.url.path != "/") path = call.url.path + path;
  call.request = {
      .method = "POST", .path = path, .headers = {{"Content-Type", "application/json"}}, .body = body.dump()};
  if (!target.api_key.empty()) call.request.headers.emplace_back("Authorization", "Bearer " + target.api_key);
  return call;
}

struct Distribution {
  double mean = 0, median = 0, std = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};

Distribution Describe(std::vector<double> values) {
  Distribution d;
  if (values.empty()) return d;
  std::sort(values.begin(), values.end());
  const double n = double(values.size());
  d.mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  for (const double v : values) d.std += (v - d.mean) * (v - d.mean) / n;
  d.std = std::sqrt(d.std);
  const auto at = [&](double q) {  // linear between the neighbours
    const double position = q * (n - 1);
    const size_t low = size_t(position);
    const size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (values[high] - values[low]) * (position - double(low));
  };
  d.median = at(0.5);
  d.p90 = at(0.9);
  d.p95 = at(0.95);
  d.p99 = at(0.99);
  d.max = values.back();
  return d;
}

}  // namespace

StatusOr<std::vector<LoadRequest>> MakeWorkload(const WorkloadOptions& o) {
  SeededStream random(o.seed);
  std::vector<LoadRequest> requests;
  if (o.dataset == "random" || o.dataset == "random-ids") {
    for (int64_t i = 0; i < o.num_prompts; ++i) {
      const int64_t in = Length(&random, o.input_len, o.range_ratio);
      const int64_t out = Length(&random, o.output_len, o.range_ratio);
      requests.push_back({RandomTokens(&random, in, o.vocab_size), int32_t(out)});
    }
  } else if (o.dataset == "generated-shared-prefix") {
    for (int64_t g = 0; g < o.groups; ++g) {
      const std::vector<int32_t> system = RandomTokens(&random, o.system_len, o.vocab_size);
      for (int64_t p = 0; p < o.prompts_per_group; ++p) {
        LoadRequest request{system, int32_t(o.output_len)};
        const std::vector<int32_t> question = RandomTokens(&random, o.question_len, o.vocab_size);
        request.prompt.insert(request.prompt.end(), question.begin(), question.end());
        requests.push_back(std::move(request));
      }
    }
    for (size_t i = requests.size(); i > 1; --i) std::swap(requests[i - 1], requests[random.Below(i)]);
  } else {
    return Unsupported("--dataset-name {}: use random, sharegpt, generated-shared-prefix or mooncake",
                       o.dataset);
  }
  SetArrivals(&requests, o.request_rate, o.seed);
  return requests;
}

void SetArrivals(std::vector<LoadRequest>* requests, double rate, uint64_t seed) {
  SeededStream random(seed ^ 0xA0761D6478BD642Full);
  double at = 0;
  for (LoadRequest& request : *requests) {
    request.arrival_s = at;
    if (rate > 0) at += -std::log(1.0 - random.Unit()) / rate;
  }
}

LoadRun RunLoad(HttpClient* client, const LoadTarget& target, const std::vector<LoadRequest>& requests,
                ProgressLine* progress_line) {
  LoadRun run;
  run.results.resize(requests.size());
  std::mutex mutex;
  std::condition_variable changed;
  int64_t open = 0, ended = 0;
  const Clock::time_point start = Clock::now();
  const auto progress = [&] {
    if (progress_line != nullptr) progress_line->Show("requests", ended, int64_t(requests.size()));
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    HttpCall call = MakeCall(target, requests[i]);
    std::unique_lock lock(mutex);
    const auto due = start + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(requests[i].arrival_s));
    while (Clock::now() < due) {
      changed.wait_until(lock, due);
      progress();
    }
    changed.wait(lock, [&] { return target.max_concurrency <= 0 || open < target.max_concurrency; });
    ++open;
    progress();
    lock.unlock();
    client->Start(std::move(call), std::make_shared<AnswerSink>(target, start, &run.results[i], [&] {
                    std::lock_guard end_lock(mutex);
                    --open;
                    ++ended;
                    changed.notify_all();
                  }));
  }
  std::unique_lock lock(mutex);
  while (open > 0) {
    changed.wait(lock);
    progress();
  }
  run.duration_s = Since(start);
  return run;
}

Json SummariseLoad(const std::vector<LoadRequest>& requests, const LoadRun& run) {
  int64_t completed = 0, input = 0, output = 0, cached = 0, verify_steps = 0;
  double accepted = 0, busy_s = 0;
  std::vector<double> e2e, ttft, tpot, itl;
  for (size_t i = 0; i < requests.size(); ++i) {
    const LoadResult& r = run.results[i];
    if (!r.ok) continue;
    ++completed;
    input += int64_t(requests[i].prompt.size());
    output += r.output_tokens;
    cached += std::max<int64_t>(0, r.cached_tokens);
    busy_s += r.latency_s;
    accepted += r.spec_accept_length * double(r.spec_verify_steps);
    verify_steps += r.spec_verify_steps;
    e2e.push_back(r.latency_s * 1e3);
    ttft.push_back(r.ttft_s * 1e3);
    if (r.output_tokens > 1) tpot.push_back((r.latency_s - r.ttft_s) * 1e3 / double(r.output_tokens - 1));
    for (const float s : r.itl_s) itl.push_back(double(s) * 1e3);
  }
  const double seconds = std::max(run.duration_s, 1e-9);
  Json j = {{"duration", run.duration_s},
            {"completed", completed},
            {"failed", int64_t(requests.size()) - completed},
            {"total_input_tokens", input},
            {"total_output_tokens", output},
            {"total_output_tokens_retokenized", nullptr},
            {"total_cached_tokens", cached},
            {"request_throughput", double(completed) / seconds},
            {"input_throughput", double(input) / seconds},
            {"output_throughput", double(output) / seconds},
            {"total_throughput", double(input + output) / seconds}};
  const auto add = [&](const std::string& name, const Distribution& d) {
    j["mean_" + name] = d.mean;
    j["median_" + name] = d.median;
    j["std_" + name] = d.std;
    j["p90_" + name] = d.p90;
    j["p95_" + name] = d.p95;
    j["p99_" + name] = d.p99;
    j["max_" + name] = d.max;
  };
  add("e2e_latency_ms", Describe(std::move(e2e)));
  add("ttft_ms", Describe(std::move(ttft)));
  add("tpot_ms", Describe(std::move(tpot)));
  add("itl_ms", Describe(std::move(itl)));
  j["concurrency"] = busy_s / seconds;
  j["accept_length"] = verify_steps > 0 ? Json(accepted / double(verify_steps)) : Json(nullptr);
  return j;
}

}  // namespace sluice
