// For tests: what a libucp.so.0 of Debian 12 says of itself.
extern "C" void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = 13;
  *release = 1;
}
