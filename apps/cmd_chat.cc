// sluice chat: a conversation with a server, in the terminal.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <thread>

#include "base/file_text.h"
#include "commands.h"
#include "config/flags.h"
#include "http/client.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

const CommandSyntax kSyntax = {
    .usage = "sluice chat [URL] [options]",
    .summary =
        "Chats with a running server (default http://127.0.0.1:30000). Type /help for what can be typed; "
        "Ctrl-C "
        "stops an answer, a second one or Ctrl-D ends.",
    .options = {{"--system", "TEXT", "System prompt. Default: none."},
                {"--api-key", "KEY", "Key of the server. Default: the environment's SLUICE_API_KEY."},
                {"--temperature", "T", "0 is greedy. Default: the server's."},
                {"--max-tokens", "N", "Most tokens of an answer. Default: what the context leaves."},
                {"--no-thinking", "", "Ask the model to answer at once."}},
    .max_positional = 1,
};

std::atomic<bool> interrupted{false};
extern "C" void OnInterrupt(int) { interrupted = true; }

double Seconds(Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); }

// "" when there is none.
std::string Text(const Json& object, std::string_view key) {
  if (!object.is_object()) return "";
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

struct Answer {
  std::string content, reasoning, finish, error;
  int64_t prompt = 0, cached = 0, tokens = 0;
  double first_s = -1, total_s = 0;
};

// Prints an answer while it comes. Colour and reasoning's grey on terminals only.
class AnswerPrinter final : public HttpSink {
 public:
  explicit AnswerPrinter(bool colour) : colour_(colour), start_(Clock::now()) {}

  void OnHead(int status, const HttpHeaders&) override { status_ = status; }

  void OnData(std::string_view bytes) override {
    pending_ += bytes;
    if (status_ != 200) return;
    try {
      ReadRecords();
    } catch (const Json::exception& e) {
      answer_.error = fmt::format("the answer is not one of this API ({}); give the URL of a sluice server",
                                  JsonComplaint(e.what()));
      pending_.clear();
    }
  }

  void OnEnd(Status status) override {
    answer_.total_s = Seconds(start_);
    if (grey_) std::cout << "\033[0m";
    if (status_ != 200 && status_ != 0) {
      const Json body = Json::parse(pending_, nullptr, false);
      answer_.error = body.is_object() && body.contains("error") ? Text(body["error"], "message") : "";
      if (answer_.error.empty()) answer_.error = fmt::format("HTTP status {}", status_);
    } else if (!status.ok() && status.code() != absl::StatusCode::kCancelled && answer_.error.empty()) {
      answer_.error = std::string(Message(status));
    }
    std::lock_guard lock(mutex_);
    done_ = true;
    signal_.notify_all();
  }

  // Calls `cancel` once when the user interrupts.
  Answer Wait(const std::function<void()>& cancel) {
    std::unique_lock lock(mutex_);
    bool asked = false;
    while (!done_) {
      signal_.wait_for(lock, std::chrono::milliseconds(50));
      if (done_ || asked || !interrupted) continue;
      asked = true;
      lock.unlock();
      cancel();
      lock.lock();
    }
    return answer_;
  }

 private:
  void ReadRecords() {
    size_t begin = 0;
    for (size_t end; (end = pending_.find("\n\n", begin)) != std::string::npos; begin = end + 2) {
      const std::string_view record = std::string_view(pending_).substr(begin, end - begin);
      if (record.starts_with("data: {")) OnRecord(Json::parse(record.substr(6), nullptr, false));
    }
    pending_.erase(0, begin);
  }
  void OnRecord(const Json& record) {
    if (!record.is_object()) return;
    if (record.contains("error")) {
      answer_.error = Text(record["error"], "message");
      if (answer_.error.empty()) answer_.error = "the server ended the answer";
      return;
    }
    if (const auto usage = record.find("usage"); usage != record.end() && usage->is_object()) {
      answer_.prompt = usage->value("prompt_tokens", 0);
      answer_.tokens = usage->value("completion_tokens", 0);
      if (usage->contains("prompt_tokens_details")) {
        answer_.cached = (*usage)["prompt_tokens_details"].value("cached_tokens", 0);
      }
    }
    for (const Json& choice : record.value("choices", Json::array())) {
      const Json delta = choice.value("delta", Json::object());
      Print(delta, "reasoning_content", true, &answer_.reasoning);
      Print(delta, "content", false, &answer_.content);
      if (choice.contains("finish_reason") && choice["finish_reason"].is_string()) {
        answer_.finish = choice["finish_reason"];
      }
    }
  }

  void Print(const Json& delta, const char* key, bool reasoning, std::string* all) {
    const auto it = delta.find(key);
    if (it == delta.end() || !it->is_string() || it->get_ref<const std::string&>().empty()) return;
    const std::string& text = it->get_ref<const std::string&>();
    if (answer_.first_s < 0) answer_.first_s = Seconds(start_);
    if (!reasoning && !answer_.reasoning.empty() && answer_.content.empty()) {
      if (grey_) std::cout << "\033[0m";
      grey_ = false;
      std::cout << "\n\n";
    } else if (reasoning && colour_ && !grey_) {
      std::cout << "\033[2m";
      grey_ = true;
    }
    *all += text;
    std::cout << text << std::flush;
  }

  const bool colour_;
  const Clock::time_point start_;
  int status_ = 0;
  bool grey_ = false;
  std::string pending_;
  Answer answer_;  // the client's thread until done_
  std::mutex mutex_;
  std::condition_variable signal_;
  bool done_ = false;
};

class Chat {
 public:
  Chat(HttpUrl url, const CommandLine& line) : url_(std::move(url)), client_(HttpClient::Make()) {
    key_ = line.Text("--api-key");
    if (const char* env = std::getenv("SLUICE_API_KEY"); key_.empty() && env != nullptr) key_ = env;
    system_ = line.Text("--system");
    thinking_ = !line.Has("--no-thinking");
    colour_ = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
    prompts_ = isatty(STDIN_FILENO) != 0;
  }

  Status Prepare(const CommandLine& line) {
    if (line.Has("--temperature")) {
      ASSIGN_OR_RETURN(temperature_, line.Real("--temperature", 0));
      if (!(temperature_ >= 0 && temperature_ <= 2))
        return Invalid("--temperature {}: use 0 to 2", temperature_);
    }
    ASSIGN_OR_RETURN(max_tokens_, line.Int("--max-tokens", 0, 0));
    ASSIGN_OR_RETURN(const Json models, Get("/v1/models"));
    if (models.contains("data") && models["data"].is_array() && !models["data"].empty()) {
      model_ = Text(models["data"][0], "id");
    }
    return OkStatus();
  }

  int Run() {
    std::signal(SIGINT, OnInterrupt);
    if (prompts_)
      std::cout << Dim(fmt::format("{} at {}; /help says what can be typed\n", model_, url_.ToString()));
    std::string text;
    while (ReadMessage(&text)) {
      if (text.empty()) continue;
      if (text[0] == '/') {
        if (!Obey(text)) break;
        continue;
      }
      if (!Say(text) && !prompts_) return kExitEnvironment;
    }
    if (prompts_) std::cout << "\n";
    return kExitOk;
  }

 private:
  std::string Dim(const std::string& text) const { return colour_ ? "\033[2m" + text + "\033[0m" : text; }

  // One line, or several of which all but the last end with a backslash.
  bool ReadMessage(std::string* text) {
    text->clear();
    for (;;) {
      if (prompts_) std::cout << (colour_ ? "\033[1m> \033[0m" : "> ") << std::flush;
      std::string line;
      if (!std::getline(std::cin, line)) return false;
      interrupted = false;
      const bool more = line.ends_with('\\');
      if (more) line.pop_back();
      *text += line;
      if (!more) return true;
      *text += '\n';
    }
  }

  bool Obey(const std::string& command) {
    if (command == "/quit" || command == "/exit") return false;
    if (command == "/new") {
      history_.clear();
      std::cout << Dim("a new conversation\n");
    } else if (command == "/undo") {
      for (int i = 0; i < 2 && !history_.empty(); ++i) history_.erase(history_.size() - 1);
      std::cout << Dim(fmt::format("{} messages are left\n", history_.size()));
    } else if (command == "/history") {
      for (const Json& m : history_) {
        std::cout << Dim(m["role"].get<std::string>() + ": ") << m["content"].get<std::string>() << "\n";
      }
    } else if (command == "/stats") {
      Stats();
    } else if (command.starts_with("/system")) {
      system_ = command.size() > 8 ? command.substr(8) : "";
      std::cout << Dim(system_.empty() ? "no system prompt\n" : "the system prompt is set\n");
    } else {
      std::cout
          << "/new        a new conversation\n/undo       take the last question back\n/history    the "
             "conversation so "
             "far\n/system T   set the system prompt (nothing: none)\n/stats      the last answer and the "
             "server\n/quit       end\nA line that ends with \\ goes on in the next one.\n";
    }
    return true;
  }

  bool Say(const std::string& text) {
    Json messages = Json::array();
    if (!system_.empty()) messages.push_back({{"role", "system"}, {"content", system_}});
    for (const Json& m : history_) messages.push_back(m);
    messages.push_back({{"role", "user"}, {"content", text}});
    Json body = {{"model", model_},
                 {"messages", messages},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
    if (temperature_ >= 0) body["temperature"] = temperature_;
    if (max_tokens_ > 0) body["max_tokens"] = max_tokens_;
    if (!thinking_) body["chat_template_kwargs"] = {{"enable_thinking", false}, {"thinking", false}};
    HttpCall call = CallTo("POST", "/v1/chat/completions");
    call.request.headers.emplace_back("Content-Type", "application/json");
    call.request.body = body.dump(-1, ' ', false, Json::error_handler_t::replace);
    interrupted = false;
    auto printer = std::make_shared<AnswerPrinter>(colour_);
    const uint64_t id = client_->Start(std::move(call), printer);
    last_ = printer->Wait([&] { client_->Cancel(id); });
    if (!last_.content.empty() || !last_.reasoning.empty()) std::cout << "\n";
    if (!last_.error.empty()) {
      std::cerr << "sluice chat: " << last_.error << "\n";
      return false;
    }
    if (interrupted) std::cout << Dim("stopped\n");
    if (last_.finish == "length") std::cout << Dim("ended at the limit of tokens\n");
    interrupted = false;
    history_.push_back({{"role", "user"}, {"content", text}});
    history_.push_back({{"role", "assistant"}, {"content", last_.content}});
    return true;
  }

  void Stats() {
    if (last_.first_s >= 0) {
      const double rate =
          last_.tokens > 1 ? double(last_.tokens - 1) / std::max(1e-9, last_.total_s - last_.first_s) : 0;
      std::cout << fmt::format(
          "last answer   first token {:.3f} s, {:.1f} tokens/s, {} tokens; prompt {} tokens, {} of them "
          "cached\n",
          last_.first_s, rate, last_.tokens, last_.prompt, last_.cached);
    }
    const auto info = Get("/server_info");
    if (!info.ok()) {
      std::cout << Message(info.status()) << "\n";
      return;
    }
    try {
      PrintState(*info);
    } catch (const Json::exception&) {
      std::cout << "the server says nothing of its state\n";
    }
  }

  void PrintState(const Json& info) {
    const Json state = info.at("internal_states").at(0);
    std::cout << fmt::format("server        {} running, {} waiting, {:.1f} tokens/s\n",
                             state.value("num_running_reqs", 0), state.value("num_queue_reqs", 0),
                             state.value("last_gen_throughput", 0.0));
    const Json cache = state.value("cache", Json::object());
    for (const char* tier : {"device", "host"}) {
      const Json pages = cache.value(std::string(tier) + "_pages", Json::object());
      if (pages.value("all", 0) == 0) continue;
      std::cout << fmt::format("{:<13} {} of {} pages cached, {} in use\n", std::string(tier) + " cache",
                               pages.value("cached", 0), pages.value("all", 0), pages.value("leased", 0));
    }
  }

  HttpCall CallTo(const char* method, const std::string& path) const {
    HttpCall call;
    call.url = url_;
    call.request.method = method;
    call.request.path = (url_.path == "/" ? "" : url_.path) + path;
    if (!key_.empty()) call.request.headers.emplace_back("Authorization", "Bearer " + key_);
    return call;
  }

  StatusOr<Json> Get(const std::string& path) {
    auto response = client_->Fetch(CallTo("GET", path));
    if (!response.ok()) {
      return Unavailable("{}; is a server running? start one with: sluice serve", Message(response.status()));
    }
    Json body = Json::parse(response->body, nullptr, false);
    if (response->status == 401) return Unavailable("the server asks for a key; pass --api-key");
    if (response->status != 200)
      return Unavailable("{}{}: HTTP {}; give the URL of a sluice server", url_.ToString(), path,
                         response->status);
    if (!body.is_object())
      return Unavailable("{}{}: the answer is not a JSON object; give the URL of a sluice server",
                         url_.ToString(), path);
    return body;
  }

  const HttpUrl url_;
  const std::unique_ptr<HttpClient> client_;
  std::string key_, system_, model_;
  bool thinking_ = true, colour_ = false, prompts_ = false;
  double temperature_ = -1;
  int64_t max_tokens_ = 0;
  Json history_ = Json::array();
  Answer last_;
};

}  // namespace

int RunChat(const std::vector<std::string>& args) {
  auto line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("chat", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  auto url = HttpUrl::ParseServer(line->positional.empty() ? "http://127.0.0.1:30000" : line->positional[0]);
  if (!url.ok()) return FailWith("chat", url.status());
  Chat chat(*std::move(url), *line);
  if (const Status ready = chat.Prepare(*line); !ready.ok()) return FailWith("chat", ready);
  return chat.Run();
}

}  // namespace sluice
