"""A server that is not ours: says a given status and body by method."""
import http.server
import threading


def other_server(test):
    """Serves until the test ends. Returns its URL and a dict that the test fills: method to (status, body)."""
    answers = {}

    class Other(http.server.BaseHTTPRequestHandler):
        def reply(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers.get(self.command, (200, "{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = reply

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    test.addCleanup(server.server_close)
    test.addCleanup(server.shutdown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", answers
