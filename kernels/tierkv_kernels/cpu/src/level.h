/* Names of functions that are compiled once per level. */
#ifndef TIERKV_LEVEL_H
#define TIERKV_LEVEL_H

#define PASTE(a, b) a##_##b
#define NAMED(a, b) PASTE(a, b)
#define EXPORT __attribute__((visibility("default")))
#define OF_LEVEL(name) NAMED(name, LEVEL)

#endif
