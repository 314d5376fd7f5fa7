// The folder of compiled kernels, shared by processes: each a file of its own, written aside and renamed.
#pragma once
#include <string>

namespace cuda {

// The code that was kept for a text and a key, which is all that it depends on beside the text; empty if there is none, or it is damaged.
std::string kept(const std::string& key, const std::string& text);

// Keeps it, if the folder can be written; of more than 64 MiB, what was not used for longest goes.
void keep(const std::string& key, const std::string& text, const std::string& code);

}  // namespace cuda
