//! Terminals, streaming commands and files of a session's sandbox; a stalled or malformed client
//! affects no other.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{PermissionsExt, symlink},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt};
use harvest_e2e::{Host, PATIENCE, most_memory};
use harvest_proto::{SessionId, api::SessionState, bridge::Exit};
use reqwest::{Method, StatusCode, header};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use serde_json::{Value, json};
use tokio_tungstenite::{
    WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest},
};

use crate::SAMPLE;

type Stream = WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

/// An idle session with a running sandbox.
async fn ready() -> (Host, SessionId) {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let body = json!({ "repository": "calc", "model": "scripted", "network": "none" });
    let session = host.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap();
    host.wait_for(&session, SessionState::Idle).await;
    (host, session)
}

/// A minimal WebSocket client with the output it has not consumed yet.
pub(crate) struct Socket(Stream, String);

impl Socket {
    pub(crate) async fn open(host: &Host, path: &str) -> Self {
        let url = format!("{}{path}", host.url().unwrap()).replacen("http", "ws", 1);
        let mut request = url.into_client_request().unwrap();
        let token = format!("Bearer {}", host.token()).parse().unwrap();
        request.headers_mut().insert(header::AUTHORIZATION, token);
        Self(connect_async(request).await.unwrap().0, String::new())
    }

    pub(crate) async fn say(&mut self, text: Value) {
        self.0.send(Message::text(text.to_string())).await.unwrap();
    }

    pub(crate) async fn type_in(&mut self, text: &str) {
        self.0.send(Message::Binary(text.as_bytes().to_vec().into())).await.unwrap();
    }

    /// The next frame other than a ping.
    async fn next(&mut self) -> Message {
        // One deadline for all frames: pings keep coming even if nothing else does.
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            let next = tokio::time::timeout_at(end, self.0.next()).await.expect("a frame comes");
            match next.expect("the socket is open").unwrap() {
                Message::Ping(_) | Message::Pong(_) => {}
                message => return message,
            }
        }
    }

    /// Reads until this text appears and returns the output up to it.
    pub(crate) async fn shows(&mut self, wanted: &str) -> String {
        while !self.1.contains(wanted) {
            match self.next().await {
                Message::Binary(bytes) => self.1 += &String::from_utf8_lossy(&bytes),
                other => panic!("{wanted:?} was not shown before {other:?}: {:?}", self.1),
            }
        }
        let end = self.1.find(wanted).expect("it was shown") + wanted.len();
        self.1.drain(..end).collect()
    }

    /// The exit of the command.
    pub(crate) async fn end(&mut self) -> Value {
        loop {
            if let Message::Text(text) = self.next().await {
                return serde_json::from_str(&text).unwrap();
            }
        }
    }
}

fn exited(code: i32) -> Value {
    json!({ "how": "code", "value": code })
}

/// A program that prints when it is in the foreground process group. A shell list would print
/// before its second command is there, and input typed in between can get lost.
const IN_FRONT: &str = "sh -c \"echo rea''dy; exec sleep 98765\"";

#[tokio::test]
async fn a_terminal_over_a_websocket_is_one() {
    let (host, session) = ready().await;
    let path = format!("/v1/sessions/{session}/pty?rows=33&cols=99");
    let mut socket = Socket::open(&host, &path).await;
    socket.shows("$ ").await;
    // Without a prompt, the terminal echoes the input exactly once.
    socket.type_in("PS1='$ '; stty -echo; tty; stty size; id -un; pwd\r").await;
    let shown = socket.shows("/workspace/calc\r\n").await;
    assert!(
        shown.contains("/dev/pts/0") && shown.contains("33 99") && shown.contains("harvest"),
        "{shown}"
    );
    socket.shows("$ ").await;
    socket.say(json!({ "resize": { "rows": 44, "cols": 111 } })).await;
    socket.type_in("until [ \"$(stty size)\" = '44 111' ]; do :; done; echo resi''zed\r").await;
    socket.shows("resized").await;
    socket.shows("$ ").await;
    socket.type_in(&format!("{IN_FRONT}\r")).await;
    socket.shows("ready").await;
    socket.type_in("\u{3}").await;
    socket.shows("$ ").await;
    socket.type_in("echo sta''tus $?.\r").await;
    socket.shows("status 130.").await;
    socket.shows("$ ").await;
    socket.type_in("exit 7\r").await;
    assert_eq!(socket.end().await["exited"]["exit"], exited(7));

    // A foreign origin, an unknown session, and a client that disconnects.
    let foreign =
        host.get(&path).header(header::ORIGIN, "https://evil.example").send().await.unwrap();
    assert_eq!(foreign.status(), StatusCode::FORBIDDEN);
    let plain = host.get(&path).send().await.unwrap();
    assert_eq!(plain.status(), StatusCode::UPGRADE_REQUIRED);
    let mut socket = Socket::open(&host, &path).await;
    socket.shows("$ ").await;
    socket.type_in("echo $$ >/tmp/shell; echo writ''ten; sleep 98765\r").await;
    socket.shows("written").await;
    drop(socket);
    let gone = "p=$(cat /tmp/shell); while kill -0 $p 2>/dev/null; do sleep 0.05; done";
    assert_eq!(host.exec(&session, "root", gone).await.0, Exit::Code(0));

    // An invalid frame closes its own socket, and a paused session is resumed.
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    let mut socket =
        Socket::open(&host, &format!("{path}&argv=sh&argv=-c&argv=tty%3B%20sleep%2098765")).await;
    socket.shows("/dev/pts/").await;
    socket.say(json!({ "start": { "argv": ["true"] } })).await;
    assert_eq!(socket.end().await["failed"]["code"], "invalid_frame");
}

#[tokio::test]
async fn shell_switches_terminal_to_raw_and_back() {
    let (host, session) = ready().await;
    let none = host.harvest(["shell", &*session.to_string()]);
    assert_eq!(none.code, 125);
    assert!(
        none.stderr.contains("must be a terminal") && none.stderr.contains("harvest exec"),
        "{none:?}"
    );

    plays_a_shell(&host, &["shell", &*session.to_string(), "--", "bash", "--norc", "-i"]).await;
}

/// Runs a shell verb on a pseudo-terminal, types into it and exits.
pub(crate) async fn plays_a_shell(host: &Host, arguments: &[&str]) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
    tcsetwinsize(&ours, Winsize { ws_row: 20, ws_col: 70, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let side = || Stdio::from(theirs.try_clone().unwrap());
    // `setsid -c` makes the terminal its controlling one, so that the kernel sends SIGWINCH.
    let mut child = Command::new("setsid")
        .args(["-c", "-w"])
        .arg(harvest_e2e::binary("harvest"))
        .args(arguments)
        .env("HARVEST_HOME", host.home())
        .env("TERM", "vt100")
        .stdin(side())
        .stdout(side())
        .stderr(side())
        .spawn()
        .unwrap();
    let echoes = || tcgetattr(&theirs).unwrap().local_modes.contains(LocalModes::ECHO);
    let done = tokio::task::spawn_blocking({
        let ours = ours.try_clone().unwrap();
        move || {
            let mut screen = Screen(ours.try_clone().unwrap().into(), String::new());
            screen.shows("$ ");
            screen.type_in("stty -echo; PS1='next> '; echo $TERM $(stty size).\r");
            screen.shows("vt100 20 70.");
            screen.shows("next> ");
            tcsetwinsize(&ours, Winsize { ws_row: 21, ws_col: 71, ws_xpixel: 0, ws_ypixel: 0 })
                .unwrap();
            screen.type_in("until [ \"$(stty size)\" = '21 71' ]; do :; done; echo resi''zed\r");
            screen.shows("resized");
            screen.shows("next> ");
            screen.type_in(&format!("{IN_FRONT}\r"));
            screen.shows("ready");
            screen.type_in("\u{3}");
            screen.shows("next> ");
            screen.type_in("echo code $?.\r");
            screen.shows("code 130.");
            screen.shows("next> ");
            screen.type_in("echo ä''ö; exit 9\r");
            screen.shows("äö");
        }
    });
    assert!(echoes(), "it begins as a terminal does");
    done.await.unwrap();
    let code = tokio::task::spawn_blocking(move || child.wait().unwrap().code()).await.unwrap();
    assert_eq!(code, Some(9));
    assert!(echoes(), "it ends as it began");
}

/// The controlling side of a pseudo-terminal with the output it has not consumed yet.
struct Screen(fs::File, String);

impl Screen {
    fn type_in(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).unwrap();
    }

    fn shows(&mut self, wanted: &str) {
        let mut buffer = [0; 4096];
        let end = Instant::now() + PATIENCE;
        while !self.1.contains(wanted) {
            let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).unwrap();
            let ready = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left)).unwrap();
            assert!(ready > 0, "{wanted:?} is not shown: {:?}", self.1);
            let count = self.0.read(&mut buffer).unwrap();
            self.1 += &String::from_utf8_lossy(&buffer[..count]);
        }
        let end = self.1.find(wanted).unwrap() + wanted.len();
        self.1.drain(..end);
    }
}

#[tokio::test]
async fn exec_streams_more_than_server_memory() {
    const BYTES: u64 = 64 << 20;
    let (host, session) = ready().await;
    let server = server(&host);
    let before = most_memory(server).unwrap();
    let id = &*session.to_string();
    let home = host.home().to_owned();
    let run = move |arguments: &[&str], input: Stdio| {
        let mut command = Command::new(harvest_e2e::binary("harvest"));
        command.args(arguments).env("HARVEST_HOME", &home).env("NO_COLOR", "1");
        command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(BYTES).unwrap();
    let zeros = || Stdio::from(fs::File::open(file.path()).unwrap());
    let counted = run(&["exec", "-i", id, "--", "wc", "-c"], zeros()).wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&counted.stdout).trim(), BYTES.to_string(), "{counted:?}");
    // Both directions at once: two sides that only write would deadlock.
    let mut echoed = run(&["exec", "-i", id, "--", "cat"], zeros());
    let read = std::io::copy(&mut echoed.stdout.take().unwrap(), &mut std::io::sink()).unwrap();
    assert_eq!((read, echoed.wait().unwrap().code()), (BYTES, Some(0)));
    let after = most_memory(server).unwrap();
    assert!(
        after < before + (24 << 20),
        "the server took {before} bytes before and {after} at most"
    );

    let mut ended = run(
        &["exec", "-i", id, "--", "sh", "-c", "head -c 1 >/dev/null; echo no >&2; exit 3"],
        zeros(),
    );
    assert_eq!(ended.wait().unwrap().code(), Some(3));
    let slow = run(&["exec", id, "--timeout", "300ms", "--", "sleep", "98765"], Stdio::null());
    assert_eq!(slow.wait_with_output().unwrap().status.code(), Some(124));
    let none = run(&["exec", id, "--", "/no/such/program"], Stdio::null());
    assert_eq!(none.wait_with_output().unwrap().status.code(), Some(127));
    let empty = run(&["exec", id, "--", "cat"], zeros()).wait_with_output().unwrap();
    assert_eq!(
        (empty.status.code(), empty.stdout.len()),
        (Some(0), 0),
        "without -i it reads nothing"
    );
}

/// The server's pid, from its own record.
fn server(host: &Host) -> u32 {
    let text = fs::read_to_string(host.home().join("server.json")).unwrap();
    u32::try_from(serde_json::from_str::<Value>(&text).unwrap()["pid"].as_u64().unwrap()).unwrap()
}

#[tokio::test]
async fn stalled_or_malformed_clients_affect_no_other_client() {
    let (host, session) = ready().await;
    let path = format!("/v1/sessions/{session}/exec");
    // More output than all buffers hold, to a client that does not read.
    let mut stalled = Socket::open(&host, &path).await;
    stalled.say(json!({ "start": { "argv": ["sh", "-c", "echo $$ >/tmp/stalled; yes"] } })).await;
    let mut typing = Socket::open(&host, &format!("/v1/sessions/{session}/pty")).await;
    for _ in 0..3 {
        let (exit, said) =
            host.exec(&session, "harvest", "head -c 3000000 /dev/zero | wc -c").await;
        assert_eq!((exit, said.trim()), (Exit::Code(0), "3000000"));
        typing.shows("$ ").await;
        typing.type_in("echo mea''nwhile\r").await;
        typing.shows("meanwhile").await;
    }
    for garbage in
        [Message::text("{"), Message::Binary(vec![0].into()), Message::text(r#"{"end":{}}"#)]
    {
        let mut socket = Socket::open(&host, &path).await;
        socket.0.send(garbage).await.unwrap();
        assert_eq!(socket.end().await["failed"]["code"], "invalid_frame");
    }
    let mut refused = Socket::open(&host, &path).await;
    refused.say(json!({ "start": { "argv": ["/no/such/program"] } })).await;
    assert_eq!(refused.end().await["failed"]["code"], "not_found");
    // A disconnect kills an attached command; a detached one continues.
    drop(stalled);
    let gone = "until [ -s /tmp/stalled ]; do sleep 0.05; done; p=$(cat /tmp/stalled); \
                while kill -0 $p 2>/dev/null; do sleep 0.05; done";
    assert_eq!(host.exec(&session, "root", gone).await.0, Exit::Code(0));
    let mut left = Socket::open(&host, &path).await;
    let script = "echo on; while [ ! -e /tmp/go ]; do sleep 0.05; done; touch /tmp/went";
    left.say(json!({ "start": { "argv": ["sh", "-c", script], "detach": true } })).await;
    left.shows("on").await;
    drop(left);
    let went = "touch /tmp/go; chmod 666 /tmp/go; until [ -e /tmp/went ]; do sleep 0.05; done";
    assert_eq!(
        host.exec_within(&session, "harvest", went, Duration::from_secs(60)).await.0,
        Exit::Code(0)
    );
    typing.shows("$ ").await;
    typing.type_in("exit\r").await;
    assert_eq!(typing.end().await["exited"]["exit"], exited(0));
}

#[tokio::test]
async fn copied_files_round_trip_unchanged() {
    let (host, session) = ready().await;
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    fs::create_dir_all(at("tree/deep")).unwrap();
    let bytes: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(at("tree/deep/bytes"), &bytes).unwrap();
    fs::write(at("tree/run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(at("tree/run.sh"), fs::Permissions::from_mode(0o750)).unwrap();
    symlink("deep/bytes", at("tree/link")).unwrap();
    symlink("/nowhere ä", at("tree/dangling")).unwrap();
    let text = |name: &str| at(name).to_str().unwrap().to_owned();
    let inside = |path: &str| format!("{session}:{path}");
    let copy = |arguments: &[&str]| host.harvest(["cp"].iter().chain(arguments));

    let folder = copy(&[&text("tree"), &inside("/tmp")]);
    assert!(folder.code == 1 && folder.stderr.contains("harvest cp -r"), "{folder:?}");
    let copied = copy(&["-r", &text("tree"), &inside("/tmp")]);
    assert_eq!(copied.code, 0, "{copied:?}");
    let (_, said) = host
        .exec(
            &session,
            "harvest",
            "cd /tmp/tree; ./run.sh; stat -c '%a %U' run.sh; readlink dangling; cksum <link",
        )
        .await;
    assert!(said.starts_with("ran\n750 harvest\n/nowhere ä\n"), "{said}");
    assert!(said.contains(" 1200000\n"), "{said}");
    let back = copy(&["-r", &inside("/tmp/tree"), &text("back")]);
    assert_eq!(back.code, 0, "{back:?}");
    assert!(fs::read(at("back/deep/bytes")).unwrap() == bytes);
    assert_eq!(fs::read_link(at("back/dangling")).unwrap().to_str(), Some("/nowhere ä"));
    assert_eq!(fs::metadata(at("back/run.sh")).unwrap().permissions().mode() & 0o777, 0o750);
    let missing = copy(&[&inside("/no/such/file"), &text("x")]);
    assert!(
        missing.code == 1 && missing.stderr.contains("/no/such/file does not exist"),
        "{missing:?}"
    );
    let shown = copy(&[&inside("/tmp/tree/run.sh"), "-"]);
    assert_eq!((shown.code, shown.stdout.as_str()), (0, "#!/bin/sh\necho ran\n"), "{shown:?}");

    // The same over the API, and its refusals.
    let files = |method: Method, query: &str| {
        host.request(method, &format!("/v1/sessions/{session}/files?{query}"))
    };
    let put =
        files(Method::PUT, "path=notes.txt&mode=600").body("some notes").send().await.unwrap();
    let put: Value = put.json().await.unwrap();
    assert_eq!(
        (put["kind"].as_str(), put["size"].as_u64(), put["mode"].as_u64()),
        (Some("file"), Some(10), Some(0o600))
    );
    let got = files(Method::GET, "path=/workspace/calc/notes.txt").send().await.unwrap();
    assert_eq!(got.headers()["x-harvest-mode"], "0600");
    assert_eq!(got.text().await.unwrap(), "some notes");
    let head = files(Method::HEAD, "path=/tmp/tree/dangling").send().await.unwrap();
    assert_eq!(
        (&head.headers()["x-harvest-kind"], &head.headers()["x-harvest-target"]),
        (&"link".parse().unwrap(), &"/nowhere%20%C3%A4".parse().unwrap())
    );
    let page: Value =
        files(Method::GET, "path=/tmp/tree&limit=2").send().await.unwrap().json().await.unwrap();
    let names = |page: &Value| -> Vec<String> {
        page["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        (names(&page), page["next_cursor"].as_str()),
        (vec!["dangling".into(), "deep".into()], Some("deep"))
    );
    let rest: Value = files(Method::GET, "path=/tmp/tree&cursor=deep")
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(
        (names(&rest), rest["next_cursor"].as_str()),
        (vec!["link".into(), "run.sh".into()], None)
    );
    // A planted link does not expose the open files of pid 1.
    host.exec(
        &session,
        "harvest",
        "ln -s /proc/1/fd /tmp/trap; ln -s /proc/1/root/etc/passwd /tmp/trick",
    )
    .await;
    for (method, query, status, code) in [
        (Method::GET, "path=/no/such/file", 404, "not_found"),
        (Method::GET, "path=/tmp/trap/0", 403, "denied"),
        (Method::GET, "path=/tmp/trick", 403, "denied"),
        (Method::PUT, "path=/tmp/trap/3/x", 403, "denied"),
        (Method::PUT, "path=/tmp/tree", 422, "invalid"),
        (Method::PUT, "path=/no/such/folder/x", 404, "not_found"),
        (Method::PUT, "path=/tmp/x&user=nobody-we-know", 422, "invalid"),
        (Method::PUT, "path=/tmp/x&mode=9", 400, "invalid_query"),
        (Method::DELETE, "path=/tmp/tree", 422, "invalid"),
        (Method::DELETE, "path=/no/such/file", 404, "not_found"),
    ] {
        let answer = files(method.clone(), query).body(vec![b'x'; 100_000]).send().await.unwrap();
        assert_eq!(answer.status(), status, "{method} {query}");
        assert_eq!(answer.json::<Value>().await.unwrap()["code"], code, "{method} {query}");
    }
    for (query, status) in
        [("path=notes.txt", 204), ("path=/tmp/tree&recursive=true", 204), ("path=/tmp/tree", 404)]
    {
        assert_eq!(files(Method::DELETE, query).send().await.unwrap().status(), status, "{query}");
    }
    // An incomplete body leaves no file.
    let pieces =
        futures_util::stream::iter([Ok(vec![b'x'; 100_000]), Err(std::io::Error::other("gone"))]);
    let broken =
        files(Method::PUT, "path=/tmp/half").body(reqwest::Body::wrap_stream(pieces)).send().await;
    assert!(broken.is_err());
    let left = "while ls -A /tmp | grep -q half; do sleep 0.05; done";
    assert_eq!(host.exec(&session, "root", left).await, (Exit::Code(0), String::new()));
}
