// Text through the bundled tokenizer and back, and mutated tokenizer files.
#include "fuzz_target.h"
#include "text/tokenizer.h"

using namespace sluice;

std::vector<std::string> FuzzSeeds() {
  return {"Mara has red apples: 17.\n<|user|>", "é 日本 🤗 \xff\xfe", std::string(300, 'a'),
          "  \t\r\n x\u00a0y", FuzzFile("tests/data/text/byte_level_small.json")};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer =
      Tokenizer::Load(std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8").value();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.starts_with('{')) {
    if (const auto parsed = Tokenizer::Parse(text, "{}"); parsed.ok())
      (*parsed)->Encode("hello  world 12345 é", true);
  }
  const std::vector<int32_t> ids = tokenizer->Encode(text, size % 2 == 0);
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) __builtin_trap();
  }
  IncrementalDetokenizer incremental(tokenizer, /*skip_special=*/true);
  std::string joined;
  for (const int32_t id : ids) joined += incremental.Add(id);
  joined += incremental.Finish();
  if (joined != tokenizer->Decode(ids, true)) __builtin_trap();
  return 0;
}
