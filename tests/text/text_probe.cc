// Answers one JSON request a line on standard output, for the differential tests:
//   {"op":"encode","tokenizer":FILE,"texts":[...],"special":true} -> {"ids":[[...],...]}
//   {"op":"decode","tokenizer":FILE,"ids":[[...],...],"skip":false} -> {"texts":[...]}
//   {"op":"render","template":TEXT,"variables":{...}} -> {"text":...} or {"error":...}
//   {"op":"prompt","template":TEXT,"messages":[...],"kwargs":{...},"generate":true} -> {"text":...} or
//   {"error":...}
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "text/chat_template.h"
#include "text/jinja/runtime.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

std::shared_ptr<const Tokenizer> TokenizerAt(const std::string& path) {
  static std::map<std::string, std::shared_ptr<const Tokenizer>> loaded;
  auto& slot = loaded[path];
  if (slot == nullptr) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream content;
    content << in.rdbuf();
    auto parsed = Tokenizer::Parse(content.str());
    if (!parsed.ok()) {
      std::cerr << path << ": " << parsed.status() << "\n";
      std::exit(1);
    }
    slot = *parsed;
  }
  return slot;
}

Json Render(const Json& request) {
  const auto parsed = jinja::Template::Parse(request["template"].get<std::string>());
  if (!parsed.ok()) return {{"error", std::string(Message(parsed.status()))}, {"syntax", true}};
  jinja::Template::Variables variables;
  for (const auto& [name, value] : request["variables"].items())
    variables.emplace_back(name, jinja::FromJson(value, false));
  jinja::Text text;
  jinja::RenderFailure failure;
  if (!(*parsed)->Render(variables, {}, &text, &failure)) return {{"error", failure.message}};
  return {{"text", text.str()}};
}

Json Prompt(const Json& request) {
  const auto parsed = ChatTemplate::Parse(request["template"].get<std::string>());
  if (!parsed.ok()) return {{"error", std::string(Message(parsed.status()))}};
  const auto prompt =
      (*parsed)->Render(request["messages"], request["kwargs"], request["generate"].get<bool>());
  if (!prompt.ok()) return {{"error", std::string(Message(prompt.status()))}};
  return {{"text", prompt->Text()}};
}

Json Answer(const Json& request) {
  const std::string op = request["op"];
  Json out = Json::object();
  if (op == "render") return Render(request);
  if (op == "prompt") return Prompt(request);
  const auto tokenizer = TokenizerAt(request["tokenizer"]);
  if (op == "encode") {
    out["ids"] = Json::array();
    for (const Json& text : request["texts"])
      out["ids"].push_back(tokenizer->Encode(text.get<std::string>(), request["special"]));
  } else {
    out["texts"] = Json::array();
    for (const Json& ids : request["ids"])
      out["texts"].push_back(tokenizer->Decode(ids.get<std::vector<int32_t>>(), request["skip"]));
  }
  return out;
}

}  // namespace
}  // namespace sluice

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout << sluice::Answer(sluice::Json::parse(line))
                     .dump(-1, ' ', false, sluice::Json::error_handler_t::replace)
              << std::endl;
  }
}
