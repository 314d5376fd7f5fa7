// Prints the shapes of launch/shape.h, one a line: bytes of an element, 1 of rows or 0 of heads, V, R, SG, TEAMS.
#include <cstdio>

#include "launch/shape.h"

int main() {
  for (int bytes = 2; bytes <= 4; bytes += 2)
    for (int step = 0; step < step_count; ++step) {
      const Shape s = shape_at(step, bytes);
      std::printf("%d %d %d %d %d %d\n", bytes, step < row_steps, s.v, s.r, s.sg, s.teams);
    }
}
