#include "eval/http_target.h"

#include <utility>

#include "base/file_text.h"
#include "http/client.h"

namespace sluice::eval {
namespace {

// "" when it is not there or no string.
std::string Text(const Json& object, std::string_view key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

// Answers of a decode instance whose pages nobody filled say nothing, right or wrong. `info` is of an
// instance or of a router, which shows its instances' own.
Status RefuseFake(const Json& info) {
  if (info.contains("disaggregation") && info["disaggregation"].is_object() &&
      Text(info["disaggregation"], "transfer_backend") == "fake")
    return Unsupported(
        "eval: instance {} runs with --disaggregation-transfer-backend fake, which moves no pages; start it "
        "with "
        "auto, shm or tcp",
        Text(info["disaggregation"], "instance_id"));
  if (info.contains("workers") && info["workers"].is_array())
    for (const Json& worker : info["workers"])
      if (worker.is_object() && worker.contains("answer") && worker["answer"].is_object())
        RETURN_IF_ERROR(RefuseFake(worker["answer"]));
  return OkStatus();
}

class HttpTarget final : public Target {
 public:
  HttpTarget(HttpUrl url, std::string name, std::string api_key)
      : url_(std::move(url)),
        name_(std::move(name)),
        api_key_(std::move(api_key)),
        client_(HttpClient::Make()) {}

  Status Connect() {
    ASSIGN_OR_RETURN(const Json models, Call("GET", "/v1/models", nullptr));
    if (models.contains("data") && models["data"].is_array() && !models["data"].empty() &&
        models["data"][0].is_object())
      model_ = Text(models["data"][0], "id");
    const StatusOr<Json> info = Call("GET", "/server_info", nullptr);  // other servers have none
    return info.ok() ? RefuseFake(*info) : OkStatus();
  }

  StatusOr<Answer> Ask(const Question& q) override {
    Json body = Json::object();
    body["model"] = model_;
    body["temperature"] = 0;
    body["max_tokens"] = q.max_tokens;
    if (!q.salt.empty()) body["cache_salt"] = q.salt;
    body["return_cached_tokens_details"] = true;
    const bool chat = !q.messages.empty();
    if (chat) {
      body["messages"] = q.messages;
    } else {
      body["prompt"] = q.prompt;
    }
    if (!q.stop.empty()) body["stop"] = q.stop;
    ASSIGN_OR_RETURN(const Json reply,
                     Call("POST", chat ? "/v1/chat/completions" : "/v1/completions", &body));
    try {
      Answer answer;
      const Json& choice = reply.at("choices").at(0);
      const Json& text = chat ? choice.at("message").at("content") : choice.at("text");
      if (text.is_string()) answer.text = text.get<std::string>();
      const std::string finish = choice.at("finish_reason").get<std::string>();
      answer.finish = finish == "stop"     ? FinishReason::kStop
                      : finish == "length" ? FinishReason::kLength
                                           : FinishReason::kAbort;
      const Json& usage = reply.at("usage");
      answer.prompt_tokens = usage.at("prompt_tokens").get<int32_t>();
      answer.output_tokens = usage.at("completion_tokens").get<int32_t>();
      if (const auto details = usage.find("prompt_tokens_details");
          details != usage.end() && details->is_object()) {
        answer.cached.device = details->value("cached_tokens", 0);
      }
      if (const auto ext = reply.find("sglext");
          ext != reply.end() && ext->contains("cached_tokens_details")) {
        const Json& tiers = (*ext)["cached_tokens_details"];
        answer.cached = {tiers.value("device", 0), tiers.value("host", 0), tiers.value("storage", 0)};
      }
      return answer;
    } catch (const Json::exception& e) {
      return Unavailable("{}: the answer is not one of this API ({}); give the URL of a sluice server", name_,
                         JsonComplaint(e.what()));
    }
  }

  bool has_hashes() const override { return false; }
  Status DropDevice() override {
    return Unsupported("pass l2 needs the engine in this process; give a model folder instead of a URL");
  }
  Status Restart() override {
    return Unsupported("pass l3 needs the engine in this process; give a model folder instead of a URL");
  }
  Json Describe() override {
    Json out = Json::object();
    out["url"] = name_;
    out["model"] = model_;
    const StatusOr<Json> info = Call("GET", "/server_info", nullptr);
    for (const char* key :
         {"attn_cp_size", "lane_pages", "rank_bytes_moved", "kv_tokens", "kv_cache_dtype"}) {
      out[key] = info.ok() && info->contains(key) ? (*info)[key] : Json(nullptr);
    }
    return out;
  }

 private:
  StatusOr<Json> Call(const std::string& method, const std::string& path, const Json* body) {
    HttpCall call;
    call.url = url_;
    call.request.method = method;
    call.request.path = (url_.path == "/" ? "" : url_.path) + path;
    if (!api_key_.empty()) call.request.headers.push_back({"authorization", "Bearer " + api_key_});
    if (body != nullptr) {
      call.request.headers.push_back({"content-type", "application/json"});
      call.request.body = body->dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    StatusOr<HttpResponse> response = client_->Fetch(std::move(call));
    if (!response.ok()) return response.status();
    Json reply = Json::parse(response->body, nullptr, /*allow_exceptions=*/false);
    if (response->status != 200) {
      std::string message = reply.is_object() && reply.contains("error") && reply["error"].is_object()
                                ? Text(reply["error"], "message")
                                : "";
      return Unavailable("{}{}: HTTP {} {}", url_.ToString(), path, response->status, message);
    }
    if (!reply.is_object())
      return Unavailable("{}{}: the answer is not a JSON object; give the URL of a sluice server",
                         url_.ToString(), path);
    return reply;
  }

  const HttpUrl url_;
  const std::string name_, api_key_;
  std::string model_;
  const std::unique_ptr<HttpClient> client_;
};

}  // namespace

StatusOr<std::unique_ptr<Target>> MakeHttpTarget(const std::string& url, const std::string& api_key) {
  ASSIGN_OR_RETURN(HttpUrl parsed, HttpUrl::ParseServer(url));
  auto target = std::make_unique<HttpTarget>(std::move(parsed), url, api_key);
  RETURN_IF_ERROR(target->Connect());
  return target;
}

}  // namespace sluice::eval
