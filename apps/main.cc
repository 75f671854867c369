// sluice <command> [options]: picks the command; everything else is in cmd_<name>.cc.
#include <csignal>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "version.h"

namespace sluice {
namespace {

void PrintUsage(std::ostream& out) {
  out << "usage: sluice <command> [options]\n\ncommands:\n";
  for (const Command& c : Commands()) {
    out << "  " << c.name << std::string(c.name.size() < 16 ? 16 - c.name.size() : 1, ' ') << c.summary
        << "\n";
  }
  out << "\n  sluice <command> --help   options of a command\n"
         "  sluice --version          version, commit, compiler, backends\n"
         "\nexit codes: 0 ok, 1 a check failed, 2 usage, 3 environment\n";
}

// The command that the first one or two words name; `used` is how many words that was.
const Command* FindCommand(const std::vector<std::string>& words, size_t* used) {
  for (size_t n : {size_t(2), size_t(1)}) {
    if (words.size() < n) continue;
    const std::string name = n == 2 ? words[0] + " " + words[1] : words[0];
    for (const Command& c : Commands()) {
      if (c.name == name) {
        *used = n;
        return &c;
      }
    }
  }
  return nullptr;
}

// "bench" alone or with an unknown second word: the rows that start with it.
bool PrintGroup(std::ostream& out, const std::string& word) {
  bool any = false;
  for (const Command& c : Commands()) {
    if (!c.name.starts_with(word + " ")) continue;
    if (!any) out << "usage: sluice " << word << " <what> [options]\n\n";
    any = true;
    out << "  sluice " << c.name << std::string(c.name.size() < 16 ? 16 - c.name.size() : 1, ' ') << c.summary
        << "\n";
  }
  return any;
}

int Main(std::vector<std::string> words) {
  if (words.empty()) {
    PrintUsage(std::cerr);
    return kExitUsage;
  }
  if (words[0] == "--version" || words[0] == "version") {
    std::cout << VersionText();
    return kExitOk;
  }
  const bool help_word = words[0] == "help" && words.size() > 1;  // "help bench ops" is "bench ops --help"
  if (words[0] == "--help" || words[0] == "-h" || (words[0] == "help" && !help_word)) {
    PrintUsage(std::cout);
    return kExitOk;
  }
  if (help_word) words.erase(words.begin());
  size_t used = 0;
  const Command* command = FindCommand(words, &used);
  if (command == nullptr) {
    const bool asks_help = help_word || (words.size() == 2 && (words[1] == "--help" || words[1] == "-h"));
    if (asks_help && PrintGroup(std::cout, words[0])) return kExitOk;
    if (PrintGroup(std::cerr, words[0])) return kExitUsage;
    std::cerr << "sluice: unknown command '" << words[0] << "'\n\n";
    PrintUsage(std::cerr);
    return kExitUsage;
  }
  std::vector<std::string> args(words.begin() + long(used), words.end());
  if (help_word) args = {"--help"};
  try {
    return command->run(args);
  } catch (const std::bad_alloc&) {
    std::cerr << "sluice " << command->name
              << ": out of memory; lower --mem-fraction-static or --max-total-tokens\n";
    return kExitEnvironment;
  } catch (const std::exception& e) {
    std::cerr << "sluice " << command->name << ": unexpected error: " << e.what() << "\n";
    return kExitEnvironment;
  }
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  std::signal(SIGPIPE,
              SIG_IGN);  // a client or a pager that goes away is an error code of write(), not our end
  return sluice::Main(std::vector<std::string>(argv + 1, argv + argc));
}
