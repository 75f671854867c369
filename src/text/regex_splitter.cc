#include "text/regex_splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <utility>

#include "text/utf8.h"

namespace sluice {
namespace {

// Budget of one match attempt: far above what any tokenizer pattern needs on a piece of ordinary text (a run
// of n spaces before a letter costs n), low enough that a hostile pattern cannot hold a thread for long.
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr size_t kJitStackStart = 32 * 1024;
constexpr size_t kJitStackMax = 8 * 1024 * 1024;

// Unicode's White_Space. PCRE2's \s also takes U+180E, which the reference (Unicode >= 6.3) does not.
constexpr std::string_view kSpaceSet =
    R"(\t-\r\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Rewrites the pattern into PCRE2's dialect, refusing what would silently mean something else.
StatusOr<std::string> Translate(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  size_t class_start = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      if (i + 1 >= pattern.size()) return Invalid("regex ends with a lone backslash: {}", pattern);
      const char e = pattern[++i];
      if (e == 's') {
        out += in_class ? std::string(kSpaceSet) : "[" + std::string(kSpaceSet) + "]";
      } else if (e == 'S' && !in_class) {
        out += "[^" + std::string(kSpaceSet) + "]";
      } else if (e == 'h' || e == 'H' || e == 'R' || e == 'X' || e == 'K' || e == 'G' || e == 'O' ||
                 e == 'y' || e == 'Y') {
        return Unsupported(
            "regex escape \\{} is not supported (its meaning differs between regex engines): {}", e, pattern);
      } else {
        out += '\\';
        out += e;
      }
      continue;
    }
    if (in_class) {
      if (c == '[' && !(i + 1 < pattern.size() && pattern[i + 1] == ':')) {
        return Unsupported("regex with a nested character class is not supported: {}", pattern);
      }
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') {
        return Unsupported("regex with a class intersection (&&) is not supported: {}", pattern);
      }
      if (c == '[') {  // a POSIX class [:name:] goes through whole
        const size_t end = pattern.find(":]", i + 2);
        if (end == std::string_view::npos) return Invalid("regex has an unterminated [: class: {}", pattern);
        out += pattern.substr(i, end + 2 - i);
        i = end + 1;
        continue;
      }
      if (c == ']' && i > class_start) in_class = false;
      out += c;
      continue;
    }
    out += c;
    if (c == '[') {
      in_class = true;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') {
        out += '^';
        ++i;
      }
      class_start = i + 1;
    }
  }
  return out;
}

struct ThreadScratch {
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  pcre2_match_data* data = nullptr;
  ThreadScratch() {
    context = pcre2_match_context_create(nullptr);
    stack = pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr);
    data = pcre2_match_data_create(1, nullptr);
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~ThreadScratch() {
    pcre2_match_data_free(data);
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
  }
};

ThreadScratch& Scratch() {
  thread_local ThreadScratch scratch;
  return scratch;
}

struct Cut {
  size_t begin, end;
  bool match;
};

}  // namespace

struct RegexSplitter::Compiled {
  pcre2_code* code = nullptr;
  ~Compiled() { pcre2_code_free(code); }
};

RegexSplitter::RegexSplitter(std::unique_ptr<Compiled> compiled, Options options)
    : compiled_(std::move(compiled)), options_(options) {}
RegexSplitter::~RegexSplitter() = default;

StatusOr<std::unique_ptr<const RegexSplitter>> RegexSplitter::Create(std::string_view pattern,
                                                                     Options options) {
  ASSIGN_OR_RETURN(const std::string translated, Translate(pattern));
  int error = 0;
  PCRE2_SIZE offset = 0;
  // MULTILINE: in Oniguruma's dialect ^ and $ always match at line borders.
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                                   &offset, nullptr);
  if (code == nullptr) {
    char message[256] = {};
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(message), sizeof message);
    return Invalid("regex does not compile ({} at offset {}): {}", message, offset, translated);
  }
  auto compiled = std::make_unique<Compiled>();
  compiled->code = code;
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without JIT the interpreter gives the same matches
  return std::unique_ptr<const RegexSplitter>(new RegexSplitter(std::move(compiled), options));
}

StatusOr<std::unique_ptr<const RegexSplitter>> RegexSplitter::CreateLiteral(std::string_view literal,
                                                                            Options options) {
  std::string pattern;
  for (const char c : literal) {
    if (std::string_view(R"(\^$.|?*+()[]{}-&#)").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return Create(pattern, options);
}

void RegexSplitter::Split(std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const {
  ThreadScratch& scratch = Scratch();
  const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer(scratch.data);
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());

  // Behaviours need at most the previous cut, so the cuts are consumed as they come.
  Cut held{0, 0, false};
  bool has_held = false;
  const auto emit = [&](size_t begin, size_t end) {
    if (end > begin) piece(text.substr(begin, end - begin));
  };
  const auto flush = [&] {
    if (has_held) emit(held.begin, held.end);
    has_held = false;
  };
  const auto consume = [&](Cut cut) {
    if (options_.invert) cut.match = !cut.match;
    switch (options_.behavior) {
      case SplitBehavior::kIsolated:
        emit(cut.begin, cut.end);
        break;
      case SplitBehavior::kRemoved:
        if (!cut.match) emit(cut.begin, cut.end);
        break;
      case SplitBehavior::kContiguous:
        if (has_held && held.match == cut.match) {
          held.end = cut.end;
        } else {
          flush();
          held = cut, has_held = true;
        }
        break;
      case SplitBehavior::kMergedWithPrevious:
        // A match joins the non-match before it; a match after a match stands alone.
        if (cut.match && has_held && !held.match) {
          held.end = cut.end;
          held.match = true;
          flush();
        } else {
          flush();
          held = cut, has_held = true;
          if (cut.match) flush();
        }
        break;
      case SplitBehavior::kMergedWithNext:
        if (!cut.match && has_held && held.match) {
          held.end = cut.end;
          held.match = false;
          flush();
        } else {
          flush();
          held = cut, has_held = true;
          if (!cut.match) flush();
        }
        break;
    }
  };

  size_t done = 0, pos = 0;
  while (pos <= text.size()) {
    int rc = pcre2_match(compiled_->code, subject, text.size(), pos, PCRE2_NO_UTF_CHECK, scratch.data,
                         scratch.context);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    size_t begin, end;
    if (rc < 0) {
      if (pos >= text.size()) break;
      begin = pos, end = pos + DecodeUtf8(text, pos).bytes;
    } else {
      begin = ovector[0], end = ovector[1];
    }
    if (end <=
        begin) {  // an empty match cuts there, but not right after the last cut; step over one character
      if (begin > done) {
        consume({done, begin, false});
        consume({begin, begin, true});
        done = begin;
      }
      if (begin >= text.size()) break;
      pos = begin + DecodeUtf8(text, begin).bytes;
      continue;
    }
    if (begin > done) consume({done, begin, false});
    consume({begin, end, true});
    done = pos = end;
  }
  if (done < text.size()) consume({done, text.size(), false});
  flush();
}

}  // namespace sluice
