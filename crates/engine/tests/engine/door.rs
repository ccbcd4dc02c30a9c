//! The one way out of a sandbox.

use super::*;

#[test]
fn a_name_is_reached_through_the_door_and_by_no_other_way() {
    the_door_is_the_only_way(&World::new());
}

pub(crate) fn the_door_is_the_only_way(world: &World) {
    let running = world.start();
    let door = UnixListener::bind(&running.door).unwrap();
    fs::set_permissions(&running.door, std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .unwrap();
    thread::spawn(move || {
        for stream in door.incoming() {
            thread::spawn(move || gateway(stream.unwrap()));
        }
    });
    let said = shell(&running, "wget -q -O - http://forge.example:8080/hello");
    assert_eq!(said.out, "forge.example:8080 says hello", "{said:?}");
    assert_ne!(shell(&running, "wget -q -O - http://elsewhere.example/").exit, Exit::Code(0));
}

/// Opens the way to `forge.example` only, and answers there as a web server.
fn gateway(stream: UnixStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut stream) = (String::new(), stream);
    reader.read_line(&mut line).unwrap();
    let ask: Ask = serde_json::from_str(&line).unwrap();
    let (Ask::Lookup { name } | Ask::Connect { name, .. }) = &ask;
    let open = name == "forge.example";
    let answer =
        if open { Answer::Open } else { Answer::Refused { reason: "not allowed".to_owned() } };
    let _ = writeln!(stream, "{}", serde_json::to_string(&answer).unwrap());
    if let Ask::Connect { name, port } = ask {
        let mut request = [0u8; 64];
        let _ = reader.read(&mut request);
        let body = format!("{name}:{port} says hello\n");
        let _ = write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}
