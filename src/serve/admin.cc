// What operators ask: health, models, server info, load, metrics, flush, abort.
#include "api/json_writer.h"
#include "serve/app_server.h"

namespace sluice {

using Json = nlohmann::ordered_json;

void AppServer::Health(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  if (draining_) {
    exchange->Respond(Refusal({.http_status = 503,
                               .message = "the server is shutting down",
                               .type = "service_unavailable",
                               .code = "unavailable"}));
  } else {
    exchange->Respond({.body = R"({"status":"ok"})"});
  }
}

namespace {

// One token through the whole engine; the answer is the health.
class HealthProbe final : public OutputChannel {
 public:
  explicit HealthProbe(std::shared_ptr<HttpExchange> exchange) : exchange_(std::move(exchange)) {}
  void Push(OutputEvent event) override {
    if (event.finish == FinishReason::kNone) return;
    const bool well = event.finish == FinishReason::kStop || event.finish == FinishReason::kLength;
    exchange_->Post([exchange = exchange_, well, status = event.error] {
      if (well) {
        exchange->Respond({.body = R"({"status":"ok"})"});
      } else {
        ApiError error = ErrorFromStatus(status);
        error.http_status = 503;
        exchange->Respond(ErrorResponse(error, 1));
      }
    });
  }

 private:
  const std::shared_ptr<HttpExchange> exchange_;
};

Json RoomsJson(const std::vector<transfer::RoomRecord>& rooms) {
  Json out = Json::array();
  for (const transfer::RoomRecord& r : rooms) {
    Json o = {{"room", r.room},
              {"phase", r.phase},
              {"prompt_tokens", r.prompt_tokens},
              {"pages", r.pages},
              {"layers", {{"done", r.layers_done}, {"of", r.layers}}},
              {"bytes", {{"done", r.bytes_done}, {"of", r.bytes}}}};
    if (*r.result != 0) o["result"] = r.result;
    if (!r.error.empty()) o["last_error"] = r.error;
    if (*r.mode != 0) {
      o["mode"] = r.mode;
      if (!r.fallback.empty()) o["fallback"] = r.fallback;
      o["bytes_by_component"] = {{"latent", r.latent_bytes},
                                 {"index", r.index_bytes},
                                 {"draft", r.draft_bytes},
                                 {"aux", r.aux_bytes}};
      o["bytes_before_forward_end"] = r.bytes_overlapped;
      o["chunks"] = r.chunks;
      o["writes"] = r.writes;
      o["write_retries"] = r.retries;
      o["resumes"] = r.resumes;
      o["sent_at_end"] = {{"layers", r.layers_at_end}, {"bytes", r.bytes_at_end}};
      o["seconds"] = {{"bootstrap", r.bootstrap_s},
                      {"queue", r.queue_s},
                      {"wait_layers", r.wait_layers_s},
                      {"wait_completions", r.wait_completions_s},
                      {"transfer", r.transfer_s}};
    }
    out.push_back(std::move(o));
  }
  return out;
}

}  // namespace

void AppServer::HealthGenerate(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  if (draining_) return Health(http, exchange);
  Request request;
  request.id = NextRequestId();
  request.rid = fmt::format("HEALTH_CHECK_{}", request.id.value);
  request.prompt = {0};
  request.sampling.max_tokens = 1;
  request.sampling.temperature = 0;
  request.priority = 1000000;
  request.deadline = clock_->Now() + Nanos(20e9);
  request.output = std::make_shared<HealthProbe>(exchange);
  if (const Status status = engine_->Submit(std::move(request)); !status.ok()) {
    // A full queue is load, not illness.
    if (status.code() == absl::StatusCode::kResourceExhausted) return Health(http, exchange);
    exchange->Respond(Refusal(ErrorFromStatus(status)));
  }
}

void AppServer::Models(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const Json model = {{"id", options_.model_name},
                      {"object", "model"},
                      {"created", started_unix_s_},
                      {"owned_by", "sluice"},
                      {"root", options_.model_name},
                      {"parent", nullptr},
                      {"max_model_len", options_.limits.context_length}};
  constexpr std::string_view kPrefix = "/v1/models/";
  if (!http.path.starts_with(kPrefix)) {
    exchange->Respond({.body = Json{{"object", "list"}, {"data", {model}}}.dump()});
  } else if (http.path.substr(kPrefix.size()) == options_.model_name) {
    exchange->Respond({.body = model.dump()});
  } else {
    exchange->Respond(
        Refusal({.http_status = 404,
                 .message = fmt::format("the model {} is not served here; this is {}",
                                        Quoted(http.path.substr(kPrefix.size())), options_.model_name),
                 .type = "not_found_error",
                 .param = "model",
                 .code = "model_not_found"}));
  }
}

// What evaluation tools ask before they leave tokens to /tokenize and /detokenize.
void AppServer::TokenizerInfo(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  const auto text = [this](std::span<const int32_t> ids) {
    return ids.empty() ? Json() : Json(std::string(tokenizer_->TokenBytes(ids[0])));
  };
  const Json info = {{"tokenizer_class", "tokenizer.json"},
                     {"bos_token", text(tokenizer_->PromptPrefix())},
                     {"eos_token", text(options_.stop_tokens)},
                     {"vocab_size", tokenizer_->vocab_size()},
                     {"model_max_length", options_.limits.context_length}};
  exchange->Respond({.body = info.dump(-1, ' ', false, Json::error_handler_t::replace)});
}

void AppServer::ModelInfo(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  Json info = options_.model_info.is_object() ? options_.model_info : Json::object();
  info["model_path"] = options_.model_path;
  info["served_model_name"] = options_.model_name;
  info["is_generation"] = true;
  info["weight_version"] = "default";
  exchange->Respond({.body = info.dump()});
}

void AppServer::ServerInfo(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  const EngineSnapshot e = engine_->Snapshot();
  Json info = options_.server_info.is_object() ? options_.server_info : Json::object();
  info["version"] = options_.version;
  info["model_path"] = options_.model_path;
  info["served_model_name"] = options_.model_name;
  info["status"] = draining_ ? "draining" : "ready";
  info["max_total_num_tokens"] = e.max_total_tokens;
  info["context_length"] = options_.limits.context_length;
  const auto pages = [](const TierCounts& c) {
    return Json{{"all", c.all}, {"free", c.free}, {"leased", c.leased}, {"cached", c.cached}};
  };
  const CacheStats& c = e.cache;
  info["internal_states"] = Json::array(
      {{{"num_running_reqs", e.running},
        {"num_queue_reqs", e.queued},
        {"num_used_tokens", e.used_tokens},
        {"last_gen_throughput", metrics_.GenerationRate(e)},
        {"steps", e.steps},
        {"prompt_tokens_total", e.prompt_tokens_total},
        {"generation_tokens_total", e.generation_tokens_total},
        {"cached_tokens_total", e.cached_tokens_total},
        {"retractions_total", e.retractions_total},
        {"forced_tokens_total", e.forced_tokens_total},
        {"requests_finished", e.requests_finished},
        {"requests_aborted", e.requests_aborted},
        {"requests_failed", e.requests_failed},
        {"requests_rejected", e.requests_rejected},
        {"engine_cpu_seconds", e.cpu_seconds},
        {"http_cpu_seconds", http_->cpu_seconds()},
        {"text_cpu_seconds", pool_->cpu_seconds()},
        {"cache",
         {{"device_pages", pages(c.device)},
          {"host_pages", pages(c.host)},
          {"nodes", c.nodes},
          {"lookup_tokens", c.lookup_tokens},
          {"hit_tokens",
           {{"device", c.hit_tokens_device}, {"host", c.hit_tokens_host}, {"storage", c.hit_tokens_storage}}},
          {"evicted_pages", {{"device", c.evicted_pages_device}, {"host", c.evicted_pages_host}}},
          {"backup_pages", c.backup_pages},
          {"load_pages", c.load_pages},
          {"pending_backups", c.pending_backups},
          {"pending_loads", c.pending_loads},
          {"storage_read_bytes", c.storage_read_bytes},
          {"storage_write_bytes", c.storage_write_bytes},
          {"storage_errors", c.storage_errors}}}}});
  if (const PdSnapshot& pd = e.pd; !pd.role.empty()) {
    Json peers = Json::array();
    for (const std::string& peer : pd.peers) peers.push_back(peer);
    info["disaggregation"] = {
        {"role", pd.role},
        {"transfer_backend", pd.transport},
        {"instance_id", pd.instance_id},
        {"epoch", pd.epoch},
        {"peers", peers},
        {"rooms",
         {{"active", pd.active_rooms},
          {"completed", pd.rooms_completed},
          {"failed", pd.rooms_failed},
          {"aborted", pd.rooms_aborted},
          {"per_layer", pd.rooms_per_layer},
          {"monolithic", {{"asked_for", pd.rooms_by_flag}, {"fault", pd.rooms_by_fault}}},
          {"empty", pd.rooms_empty},
          {"now", RoomsJson(pd.rooms)},
          {"ended", RoomsJson(pd.ended)}}},
        {"bytes_by_component",
         {{"latent", pd.latent_bytes},
          {"index", pd.index_bytes},
          {"draft", pd.draft_bytes},
          {"aux", pd.aux_bytes}}},
        {"bytes_sent", pd.bytes_sent},
        {"bytes_received", pd.bytes_received},
        {"bytes_before_forward_end", pd.bytes_before_forward_end},
        {"writes", pd.writes},
        {"write_retries", pd.write_retries},
        {"resumes", pd.resumes},
        {"layers_sent_at_end", pd.layers_sent_at_end},
        {"bytes_sent_at_end", pd.bytes_sent_at_end},
        {"wait_layers_seconds", pd.wait_layers_s},
        {"exposed_seconds", pd.wait_completions_s},
        {"transfer_seconds", pd.transfer_s},
        {"leased_pages", pd.leased_pages},
        {"outstanding_writes", pd.outstanding_writes},
        {"aborts_sent", pd.aborts_sent},
        {"abort_acks", pd.abort_acks},
        {"fences", pd.fences},
        {"late_frames", pd.late_frames},
        {"digests_checked", pd.digests_checked},
        {"last_error", pd.last_error}};
  }
  exchange->Respond({.body = info.dump(-1, ' ', false, Json::error_handler_t::replace)});
}

void AppServer::Loads(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const EngineSnapshot e = engine_->Snapshot();
  const std::string_view include = http.QueryParam("include");
  const auto wanted = [&](std::string_view section) {
    return include.empty() || include == "all" || include.find(section) != include.npos;
  };
  const auto ratio = [](int64_t part, int64_t whole) { return whole > 0 ? double(part) / double(whole) : 0; };
  Json load = {{"dp_rank", 0}};
  if (wanted("core")) {
    load["num_running_reqs"] = e.running;
    load["num_waiting_reqs"] = e.queued;
    load["num_total_reqs"] = e.running + e.queued;
    load["num_used_tokens"] = e.used_tokens;
    load["max_total_num_tokens"] = e.max_total_tokens;
    load["token_usage"] = ratio(e.used_tokens, e.max_total_tokens);
    load["gen_throughput"] = metrics_.GenerationRate(e);
    load["cache_hit_rate"] = ratio(e.cached_tokens_total, e.prompt_tokens_total);
  }
  if (wanted("queues")) load["queues"] = {{"waiting", e.queued}, {"retracted", e.retractions_total}};
  exchange->Respond({.body = Json{{"version", options_.version},
                                  {"dp_rank_count", 1},
                                  {"loads", {load}},
                                  {"aggregate",
                                   {{"total_running_reqs", e.running},
                                    {"total_waiting_reqs", e.queued},
                                    {"total_reqs", e.running + e.queued},
                                    {"avg_token_usage", ratio(e.used_tokens, e.max_total_tokens)}}}}
                                 .dump()});
}

void AppServer::Page(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  if (live_ == nullptr) {
    return exchange->Respond(Refusal({.http_status = 404,
                                      .message = "there is no page here (--disable-page)",
                                      .type = "not_found_error",
                                      .code = "not_found"}));
  }
  exchange->Respond(PageResponse());
}

void AppServer::Live(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  if (live_ != nullptr && live_->Add(exchange)) return;
  exchange->Respond(Refusal(live_ == nullptr
                                ? ApiError{.http_status = 404,
                                           .message = "there is no live data here (--disable-page)",
                                           .type = "not_found_error",
                                           .code = "not_found"}
                                : ApiError{.http_status = 503,
                                           .message = "too many viewers; close another page",
                                           .type = "overloaded_error",
                                           .code = "overloaded"}));
}

void AppServer::Metrics(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  exchange->Respond({.content_type = "text/plain; version=0.0.4; charset=utf-8",
                     .body = metrics_.Render(engine_->Snapshot(), {.connections = http_->connections(),
                                                                   .http_cpu_s = http_->cpu_seconds(),
                                                                   .text_cpu_s = pool_->cpu_seconds()})});
}

void AppServer::FlushCache(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  if (engine_->Flush()) {
    exchange->Respond({.content_type = "text/plain", .body = "Cache flushed.\n"});
  } else {
    exchange->Respond(
        {.status = 400,
         .content_type = "text/plain",
         .body = "Cache not flushed: requests run or wait; try again when the server is idle.\n"});
  }
}

void AppServer::Storage(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const StorageAdmin& storage = options_.storage;
  if (!storage.describe)
    return exchange->Respond(
        Refusal({.http_status = 501,
                 .message = "this server has no host tier that storage could stand behind",
                 .code = "unsupported"}));
  Status status;
  if (http.method == "PUT") {
    const Json body = Json::parse(http.body, nullptr, /*allow_exceptions=*/false);
    if (body.is_discarded())
      return exchange->Respond(Refusal({.http_status = 400, .message = "the body is not valid JSON"}));
    status = storage.attach(body);
  } else if (http.method == "DELETE") {
    status = storage.detach();
  }
  AnswerStorage(status, exchange);
}

void AppServer::ClearStorage(HttpRequest&, const std::shared_ptr<HttpExchange>& exchange) {
  if (!options_.storage.clear)
    return exchange->Respond(
        Refusal({.http_status = 501, .message = "this server has no storage tier", .code = "unsupported"}));
  AnswerStorage(options_.storage.clear(), exchange);
}

void AppServer::AnswerStorage(const Status& status, const std::shared_ptr<HttpExchange>& exchange) {
  if (status.ok()) return exchange->Respond({.body = options_.storage.describe().dump()});
  const int code = absl::IsFailedPrecondition(status) ? 409
                   : absl::IsNotFound(status)         ? 404
                   : absl::IsInvalidArgument(status)  ? 400
                                                      : 503;
  exchange->Respond(Refusal({.http_status = code,
                             .message = std::string(Message(status)),
                             .code = code == 409   ? "conflict"
                                     : code == 404 ? "not_attached"
                                     : code == 400 ? "bad_request"
                                                   : "storage_unavailable"}));
}

void AppServer::AbortRequests(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  AbortRequest request;
  if (auto error = ParseAbort(http.body, options_.limits, &request))
    return exchange->Respond(Refusal(*error));
  int64_t aborted = 0;
  if (request.abort_all) {
    for (const auto& generation : running_.All()) {
      generation->Abort();
      ++aborted;
    }
  } else if (auto generation = running_.Find(request.rid)) {
    generation->Abort(request.rid);
    aborted = 1;
  } else {
    aborted = engine_->Abort(request.rid) ? 1 : 0;  // one of several prompts of a request
  }
  std::string out;
  JsonWriter w(&out);
  w.Object().Key("aborted").Int(aborted).End();
  exchange->Respond({.body = std::move(out)});
}

}  // namespace sluice
