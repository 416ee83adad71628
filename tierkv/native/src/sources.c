/* From which sources this library was made; the build says so. */
__attribute__((visibility("default"))) const char *tierkv_sources(void) { return TIERKV_SOURCES; }
