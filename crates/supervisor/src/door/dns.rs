//! The sandbox's DNS resolver. It answers A queries for names that the gateway allows, with
//! synthetic addresses: no other record types, no real addresses, no recursion.

use std::{io, net::Ipv4Addr, rc::Rc, sync::Arc, time::Duration};

use harvest_proto::door::{DoorReply, DoorRequest};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    sync::Semaphore,
    time::timeout,
};

use super::{Gateway, is_unavailable};

// Concurrent UDP queries; further ones are dropped, and clients retry.
const MAX_QUERIES: usize = 256;

pub(super) const MAX_TCP_CONNECTIONS: usize = 64;
const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

// Addresses never change; a minute avoids a query for every connection.
const TTL_SECONDS: u32 = 60;

const HEADER_BYTES: usize = 12;
const MAX_NAME_BYTES: usize = 253;

const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DnsAnswer {
    Address(Ipv4Addr),
    /// The name exists, this type of record does not.
    Empty,
    FormErr,
    ServFail,
    NxDomain,
    NotImplemented,
}

pub(super) async fn serve_udp(socket: Rc<UdpSocket>, gateway: Rc<Gateway>) {
    let permits = Arc::new(Semaphore::new(MAX_QUERIES));
    let mut buffer = [0u8; 1500];
    loop {
        let Ok((count, client)) = socket.recv_from(&mut buffer).await else {
            // An ICMP error from a client that is gone.
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { continue };
        let packet = buffer[..count].to_vec();
        let (socket, gateway) = (Rc::clone(&socket), Rc::clone(&gateway));
        tokio::task::spawn_local(async move {
            let _permit = permit;
            if let Some(reply) = respond(&packet, &gateway).await {
                let _client_gone = socket.send_to(&reply, client).await;
            }
        });
    }
}

/// Answers the queries of a TCP connection.
pub(super) async fn serve_connection(
    mut stream: TcpStream,
    gateway: Rc<Gateway>,
) -> io::Result<()> {
    loop {
        let length = timeout(TCP_IDLE_TIMEOUT, stream.read_u16()).await??;
        let mut packet = vec![0u8; usize::from(length)];
        timeout(TCP_IDLE_TIMEOUT, stream.read_exact(&mut packet)).await??;
        let Some(reply) = respond(&packet, &gateway).await else { return Ok(()) };
        let length = u16::try_from(reply.len()).unwrap_or(0);
        stream.write_all(&[&length.to_be_bytes()[..], &reply].concat()).await?;
    }
}

async fn respond(packet: &[u8], gateway: &Gateway) -> Option<Vec<u8>> {
    let answer = match parse(packet)? {
        Err(answer) => answer,
        Ok(question)
            if question.class != CLASS_IN
                || question.kind != TYPE_A
                || question.name.is_empty() =>
        {
            DnsAnswer::Empty
        }
        Ok(question) => resolve(&question.name, gateway).await,
    };
    Some(reply(packet, answer))
}

// A known name is answered even without the gateway: the connection will wait for it and be checked
// then.
async fn resolve(name: &str, gateway: &Gateway) -> DnsAnswer {
    if gateway.sealed {
        return DnsAnswer::NxDomain;
    }
    let request = DoorRequest::Lookup { name: name.to_owned() };
    let reply = match gateway.ask(&request).await {
        Err(error) if is_unavailable(&error) => match gateway.names.lookup(name) {
            Some(address) => return DnsAnswer::Address(address),
            None => gateway.ask_with_retry(&request).await,
        },
        other => other,
    };
    match reply {
        Ok((DoorReply::Open, _)) => {
            gateway.names.assign(name).map_or(DnsAnswer::ServFail, DnsAnswer::Address)
        }
        Ok((DoorReply::Refused { .. }, _)) => DnsAnswer::NxDomain,
        Err(_) => DnsAnswer::ServFail,
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Question {
    name: String,
    kind: u16,
    class: u16,
}

// `None` for packets that must not be answered: too short to have an id, or a response.
fn parse(packet: &[u8]) -> Option<Result<Question, DnsAnswer>> {
    let header = packet.get(..HEADER_BYTES)?;
    if header[2] & 0x80 != 0 {
        return None;
    }
    if header[2] & 0x78 != 0 {
        return Some(Err(DnsAnswer::NotImplemented));
    }
    if u16::from_be_bytes([header[4], header[5]]) != 1 {
        return Some(Err(DnsAnswer::FormErr));
    }
    Some(question(&packet[HEADER_BYTES..]).map(|(question, _)| question).ok_or(DnsAnswer::FormErr))
}

// The question and its length. The name is never compressed, because nothing precedes it.
fn question(bytes: &[u8]) -> Option<(Question, usize)> {
    let mut name = String::new();
    let mut at = 0;
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        let label = bytes.get(at..at + length).filter(|_| length < 64)?;
        if !label.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        name.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
        at += length;
        if name.len() > MAX_NAME_BYTES {
            return None;
        }
    }
    let rest = bytes.get(at..at + 4)?;
    let kind = u16::from_be_bytes([rest[0], rest[1]]);
    let class = u16::from_be_bytes([rest[2], rest[3]]);
    Some((Question { name, kind, class }, at + 4))
}

fn reply(packet: &[u8], answer: DnsAnswer) -> Vec<u8> {
    let code = match answer {
        DnsAnswer::Address(_) | DnsAnswer::Empty => 0,
        DnsAnswer::FormErr => 1,
        DnsAnswer::ServFail => 2,
        DnsAnswer::NxDomain => 3,
        DnsAnswer::NotImplemented => 4,
    };
    let question_bytes =
        question(packet.get(HEADER_BYTES..).unwrap_or_default()).map(|(_, length)| length);
    let question_bytes = question_bytes
        .and_then(|length| packet.get(HEADER_BYTES..HEADER_BYTES + length))
        .unwrap_or_default();
    let answers = u8::from(matches!(answer, DnsAnswer::Address(_)));
    let mut out = packet.get(..2).unwrap_or(&[0, 0]).to_vec();
    // A response with the query's RD bit; RA is set.
    out.extend([0x80 | (packet.get(2).copied().unwrap_or(0) & 0x79), 0x80 | code]);
    out.extend([0, u8::from(!question_bytes.is_empty()), 0, answers, 0, 0, 0, 0]);
    out.extend(question_bytes);
    if let DnsAnswer::Address(address) = answer {
        // The name, as a pointer to the question.
        out.extend([0xc0, 0x0c]);
        out.extend(TYPE_A.to_be_bytes());
        out.extend(CLASS_IN.to_be_bytes());
        out.extend(TTL_SECONDS.to_be_bytes());
        out.extend([0, 4]);
        out.extend(address.octets());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packet(name: &str, kind: u16) -> Vec<u8> {
        let mut packet = vec![0xab, 0xcd, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            packet.push(u8::try_from(label.len()).unwrap());
            packet.extend(label.as_bytes());
        }
        packet.push(0);
        packet.extend(kind.to_be_bytes());
        packet.extend(CLASS_IN.to_be_bytes());
        packet
    }

    #[test]
    fn names_are_lowercased() {
        let question = parse(&packet("Example.COM", 1)).unwrap().unwrap();
        assert_eq!(question, Question { name: "example.com".into(), kind: 1, class: 1 });
    }

    #[test]
    fn answer_repeats_the_question_and_id() {
        let query = packet("example.com", 1);
        let out = reply(&query, DnsAnswer::Address(Ipv4Addr::new(198, 18, 0, 7)));
        assert_eq!(out[..8], [0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1]);
        assert_eq!(out[12..query.len()], query[12..]);
        assert_eq!(out[out.len() - 4..], [198, 18, 0, 7]);
    }

    #[test]
    fn refused_name_gets_nxdomain() {
        let out = reply(&packet("evil.example", 1), DnsAnswer::NxDomain);
        assert_eq!(out[3] & 0x0f, 3);
        assert_eq!(out[6..8], [0, 0]);
    }

    #[test]
    fn malformed_queries_are_rejected_or_ignored() {
        assert_eq!(parse(&[1, 2, 3]), None);
        let mut answer = packet("example.com", 1);
        answer[2] |= 0x80;
        assert_eq!(parse(&answer), None);
        let mut two = packet("example.com", 1);
        two[5] = 2;
        assert_eq!(parse(&two), Some(Err(DnsAnswer::FormErr)));
        let cut = &packet("example.com", 1)[..20];
        assert_eq!(parse(cut), Some(Err(DnsAnswer::FormErr)));
        let mut pointer = packet("a", 1);
        pointer[12] = 0xc0;
        assert_eq!(parse(&pointer), Some(Err(DnsAnswer::FormErr)));
    }

    proptest! {
        #[test]
        fn garbage_is_never_amplified(packet in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Some(Err(answer)) = parse(&packet) {
                prop_assert!(reply(&packet, answer).len() <= packet.len());
            }
        }
    }
}
