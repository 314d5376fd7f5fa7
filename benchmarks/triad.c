/* STREAM triad, a = b + 3 c over doubles on all cores: the memory bandwidth that run.py compares with.
   Counts three arrays of bytes; the line that a store first reads (write-allocate) is not counted, as in STREAM.
   Build: cc -O3 -march=native -fopenmp -fPIC -shared triad.c -o triad.so */
#include <stddef.h>
#include <stdlib.h>
#include <omp.h>

static double *a, *b, *c;
static size_t length;

/* Arrays of n doubles, each page first touched by the thread that will use it. Returns 0 when there is no memory. */
int triad_start(size_t n) {
    length = n;
    void *p[3] = {0};
    for (int i = 0; i < 3; i++)
        if (posix_memalign(&p[i], 2u << 20, n * sizeof(double))) return 0;
    a = p[0], b = p[1], c = p[2];
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) a[i] = 0.0, b[i] = 1.0, c[i] = 2.0;
    return omp_get_max_threads();
}

/* The best of `repeats`, in GB/s; negative when a value is wrong, which also keeps the loop from being optimized away. */
double triad_best(int repeats) {
    double best = 0;
    for (int r = 0; r < repeats; r++) {
        double start = omp_get_wtime();
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < length; i++) a[i] = b[i] + 3.0 * c[i];
        double rate = 3e-9 * sizeof(double) * length / (omp_get_wtime() - start);
        if (rate > best) best = rate;
    }
    return a[0] == 7.0 && a[length - 1] == 7.0 ? best : -1;
}
