// Jinja templates over a fixed chat, and chats over fixed templates.
#include "fuzz_target.h"
#include "text/chat_template.h"

using namespace sluice;

std::vector<std::string> FuzzSeeds() {
  return {
      FuzzFile("tests/data/templates/glm_like.jinja"), FuzzFile("tests/data/templates/chatml_tools.jinja"),
      FuzzFile("tests/data/templates/strict_blocks.jinja"),
      "{% for m in messages %}{{ m.content | tojson }}{% if loop.last %}x{% endif %}{% endfor %}",
      R"([{"role":"user","content":"q"},{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]},{"role":"tool","content":[{"type":"text","text":"42"}]}])"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto fixed = ChatTemplate::Parse(FuzzFile("tests/data/templates/glm_like.jinja")).value();
  static const Json chat = Json::parse(
      R"([{"role":"system","content":"s"},{"role":"user","content":"u<|user|>"},{"role":"assistant","content":"a","reasoning_content":"r"}])");
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.starts_with('[')) {
    const Json messages = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (messages.is_array()) (void)fixed->Render(messages, Json::object(), true);
    return 0;
  }
  if (const auto parsed = ChatTemplate::Parse(text); parsed.ok())
    (void)(*parsed)->Render(chat, Json::object(), true);
  return 0;
}
