//! Tests of the door, the only way out of a sandbox.

use super::*;

#[test]
fn names_are_reachable_only_through_the_door() {
    assert_door_is_the_only_way(&World::new());
}

pub(crate) fn assert_door_is_the_only_way(world: &World) {
    let running = world.start();
    let door = UnixListener::bind(&running.door).unwrap();
    fs::set_permissions(&running.door, std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .unwrap();
    thread::spawn(move || {
        for stream in door.incoming() {
            thread::spawn(move || gateway(stream.unwrap()));
        }
    });
    let output = shell(&running, "wget -q -O - http://forge.example:8080/hello");
    assert_eq!(output.out, "forge.example:8080 says hello", "{output:?}");
    assert_ne!(shell(&running, "wget -q -O - http://elsewhere.example/").exit, Exit::Code(0));
}

/// A gateway that allows `forge.example` only and answers there as a web server.
fn gateway(stream: UnixStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut stream) = (String::new(), stream);
    reader.read_line(&mut line).unwrap();
    let request: DoorRequest = serde_json::from_str(&line).unwrap();
    let (DoorRequest::Lookup { name } | DoorRequest::Connect { name, .. }) = &request;
    let open = name == "forge.example";
    let answer = if open {
        DoorReply::Open
    } else {
        DoorReply::Refused { reason: "not allowed".to_owned() }
    };
    let _ = writeln!(stream, "{}", serde_json::to_string(&answer).unwrap());
    if let DoorRequest::Connect { name, port } = request {
        let mut received = [0u8; 64];
        let _ = reader.read(&mut received);
        let body = format!("{name}:{port} says hello\n");
        let _ = write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}
