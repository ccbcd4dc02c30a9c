//! Connections through the host's proxy.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use harvest_gateway::{GatewayConfig, HostProxies};
use harvest_proto::{
    EventBody,
    door::{DoorReply, DoorRequest},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};

use crate::{
    RecordingLedger, TestDoor,
    egress::{echo, hello},
    policy,
};

/// A proxy that knows one server under every name, and the heads of its requests.
async fn proxy(server: SocketAddr, refusal: Option<&'static str>) -> (SocketAddr, Heads) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, heads) = (listener.local_addr().unwrap(), Heads::default());
    let seen = Arc::clone(&heads);
    tokio::spawn(async move {
        while let Ok((mut inside, _)) = listener.accept().await {
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(inside.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                let is_tunnel = head.starts_with("CONNECT ");
                seen.lock().unwrap().push(head);
                if let Some(refusal) = refusal {
                    return inside.write_all(refusal.as_bytes()).await.unwrap();
                }
                if !is_tunnel {
                    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
                    return inside.write_all(answer.as_bytes()).await.unwrap();
                }
                let mut outside = TcpStream::connect(server).await.unwrap();
                // The greeting of a server may arrive with the proxy's answer.
                let established = b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\ngreeting";
                inside.write_all(established).await.unwrap();
                let _ = copy_bidirectional(&mut inside, &mut outside).await;
            });
        }
    });
    (address, heads)
}

type Heads = Arc<Mutex<Vec<String>>>;

fn door(proxy: SocketAddr) -> TestDoor {
    let url = format!("http://user:p%40ss@{proxy}");
    let variable = |name: &str| ["https_proxy", "http_proxy"].contains(&name).then(|| url.clone());
    let pinned = [("private.example.org".to_owned(), "10.0.0.1:443".parse().unwrap())].into();
    let proxies = HostProxies::from_variables(variable);
    let config = GatewayConfig { proxies, pinned, ..GatewayConfig::default() };
    TestDoor::new(
        RecordingLedger::default(),
        config,
        policy(&["name.invalid", "private.example.org"]),
    )
}

fn connect(name: &str, port: u16) -> DoorRequest {
    DoorRequest::Connect { name: name.into(), port }
}

// base64 of `user:p@ss`
const AUTHORIZATION: &str = "Basic dXNlcjpwQHNz";

#[tokio::test(flavor = "multi_thread")]
async fn tls_passes_through_a_tunnel() {
    let (address, heads) = proxy(echo().await, None).await;
    let door = door(address);
    let (reply, mut stream) = door.request(&connect("name.invalid", 443)).await;
    assert_eq!(reply, DoorReply::Open);
    let mut greeting = [0; 8];
    let hello = hello("name.invalid");
    stream.write_all(&hello).await.unwrap();
    stream.read_exact(&mut greeting).await.unwrap();
    assert_eq!(&greeting, b"greeting");
    let mut echoed = vec![0; hello.len()];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(echoed, hello);
    let heads = heads.lock().unwrap();
    let expected = format!(
        "CONNECT name.invalid:443 HTTP/1.1\r\nHost: name.invalid:443\r\n\
         Proxy-Authorization: {AUTHORIZATION}\r\n\r\n"
    );
    assert_eq!(*heads, [expected]);
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_is_sent_in_absolute_form() {
    let (address, heads) = proxy(echo().await, None).await;
    let door = door(address);
    let (_, mut stream) = door.request(&connect("name.invalid", 80)).await;
    let request = "GET /a?b HTTP/1.1\r\nHost: name.invalid\r\nConnection: close\r\n\
        Proxy-Authorization: mine\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("hi"), "{answer}");
    let head = heads.lock().unwrap().concat().to_ascii_lowercase();
    assert!(head.starts_with("get http://name.invalid/a?b http/1.1\r\n"), "{head}");
    let authorization = AUTHORIZATION.to_ascii_lowercase();
    assert!(head.contains(&format!("proxy-authorization: {authorization}")), "{head}");
    assert!(!head.contains("mine"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn known_private_name_is_refused_before_the_proxy() {
    let (address, heads) = proxy(echo().await, None).await;
    let door = door(address);
    for port in [443, 80] {
        let (reply, _) = door.request(&connect("private.example.org", port)).await;
        assert!(matches!(reply, DoorReply::Refused { .. }), "{reply:?}");
    }
    assert!(heads.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_of_the_proxy_is_reported() {
    for (answer, words) in [
        ("HTTP/1.1 403 Filtered\r\n\r\n", "refused the connection (403)"),
        ("HTTP/1.1 407 Login\r\n\r\n", "other credentials"),
        ("SSH-2.0-x\r\n\r\n", "no HTTP response"),
        ("", "closed the connection"),
    ] {
        let door = door(proxy(echo().await, Some(answer)).await.0);
        let (reply, _) = door.request(&connect("name.invalid", 443)).await;
        let DoorReply::Refused { reason } = reply else { panic!("{answer}: {reply:?}") };
        assert!(reason.contains(words), "{answer}: {reason}");
        let events = door.ledger.wait_for_events(1).await;
        assert!(matches!(&events[..], [EventBody::EgressRefused { .. }]), "{events:?}");
    }
}
