//! The sandbox's resolver. It answers A questions for names the gateway allows and gives nothing
//! else away: no other record types, no real addresses, no recursion.

use std::{io, net::Ipv4Addr, rc::Rc, sync::Arc, time::Duration};

use harvest_proto::door::{Answer, Ask};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    time::timeout,
};

use super::{Gateway, is_absence, names::Names};

// Questions being answered; more are dropped, and their askers ask again.
const MAX_QUESTIONS: usize = 256;

const MAX_TCP: usize = 64;
const TCP_IDLE: Duration = Duration::from_secs(30);

// An address means its name for ever; a minute keeps resolvers from asking for every connection.
const TTL_SECONDS: u32 = 60;

const HEADER_BYTES: usize = 12;
const MAX_NAME_BYTES: usize = 253;

const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;

/// How a question is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Address(Ipv4Addr),
    /// The name exists, this type of record does not.
    Empty,
    FormErr,
    ServFail,
    NxDomain,
    NotImplemented,
}

/// Answers datagrams for ever.
pub(super) async fn serve_udp(socket: Rc<UdpSocket>, gateway: Rc<Gateway>, names: Rc<Names>) {
    let places = Arc::new(Semaphore::new(MAX_QUESTIONS));
    let mut buffer = [0u8; 1500];
    loop {
        let Ok((count, asker)) = socket.recv_from(&mut buffer).await else {
            // An ICMP error of an asker that is gone already; nothing of ours is wrong.
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let packet = buffer[..count].to_vec();
        let (socket, gateway, names) = (Rc::clone(&socket), Rc::clone(&gateway), Rc::clone(&names));
        tokio::task::spawn_local(async move {
            let _place = place;
            if let Some(reply) = answer(&packet, &gateway, &names).await {
                let _asker_is_gone = socket.send_to(&reply, asker).await;
            }
        });
    }
}

/// Answers connections for ever.
pub(super) async fn serve_tcp(listener: TcpListener, gateway: Rc<Gateway>, names: Rc<Names>) {
    let places = Arc::new(Semaphore::new(MAX_TCP));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (gateway, names) = (Rc::clone(&gateway), Rc::clone(&names));
        tokio::task::spawn_local(async move {
            let _place = place;
            let _asker_is_gone = converse(stream, &gateway, &names).await;
        });
    }
}

async fn converse(mut stream: TcpStream, gateway: &Gateway, names: &Names) -> io::Result<()> {
    loop {
        let length = timeout(TCP_IDLE, stream.read_u16()).await??;
        let mut packet = vec![0u8; usize::from(length)];
        timeout(TCP_IDLE, stream.read_exact(&mut packet)).await??;
        let Some(reply) = answer(&packet, gateway, names).await else { return Ok(()) };
        let length = u16::try_from(reply.len()).unwrap_or(0);
        stream.write_all(&[&length.to_be_bytes()[..], &reply].concat()).await?;
    }
}

async fn answer(packet: &[u8], gateway: &Gateway, names: &Names) -> Option<Vec<u8>> {
    let verdict = match parse(packet)? {
        Err(verdict) => verdict,
        Ok(question)
            if question.class != CLASS_IN
                || question.kind != TYPE_A
                || question.name.is_empty() =>
        {
            Verdict::Empty
        }
        Ok(question) => resolve(&question.name, gateway, names).await,
    };
    Some(reply(packet, verdict))
}

// A known name is answered though the gateway is away: the connection itself will wait for it and
// be judged then.
async fn resolve(name: &str, gateway: &Gateway, names: &Names) -> Verdict {
    if gateway.sealed {
        return Verdict::NxDomain;
    }
    let ask = Ask::Lookup { name: name.to_owned() };
    let answered = match gateway.ask(&ask).await {
        Err(error) if is_absence(&error) => match names.known(name) {
            Some(address) => return Verdict::Address(address),
            None => gateway.ask_parked(&ask).await,
        },
        other => other,
    };
    match answered {
        Ok((Answer::Open, _)) => names.give(name).map_or(Verdict::ServFail, Verdict::Address),
        Ok((Answer::Refused { .. }, _)) => Verdict::NxDomain,
        Err(_) => Verdict::ServFail,
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Question {
    name: String,
    kind: u16,
    class: u16,
}

// `None` for what must not be answered at all: too short to have an id, or itself an answer.
fn parse(packet: &[u8]) -> Option<Result<Question, Verdict>> {
    let header = packet.get(..HEADER_BYTES)?;
    if header[2] & 0x80 != 0 {
        return None;
    }
    if header[2] & 0x78 != 0 {
        return Some(Err(Verdict::NotImplemented));
    }
    if u16::from_be_bytes([header[4], header[5]]) != 1 {
        return Some(Err(Verdict::FormErr));
    }
    Some(question(&packet[HEADER_BYTES..]).map(|(question, _)| question).ok_or(Verdict::FormErr))
}

// The question and its length. A question's name is never compressed: there is nothing before it.
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

fn reply(packet: &[u8], verdict: Verdict) -> Vec<u8> {
    let code = match verdict {
        Verdict::Address(_) | Verdict::Empty => 0,
        Verdict::FormErr => 1,
        Verdict::ServFail => 2,
        Verdict::NxDomain => 3,
        Verdict::NotImplemented => 4,
    };
    let asked = question(packet.get(HEADER_BYTES..).unwrap_or_default()).map(|(_, length)| length);
    let asked = asked
        .and_then(|length| packet.get(HEADER_BYTES..HEADER_BYTES + length))
        .unwrap_or_default();
    let answers = u8::from(matches!(verdict, Verdict::Address(_)));
    let mut out = packet.get(..2).unwrap_or(&[0, 0]).to_vec();
    // An answer, its recursion bit as asked; recursion available.
    out.extend([0x80 | (packet.get(2).copied().unwrap_or(0) & 0x79), 0x80 | code]);
    out.extend([0, u8::from(!asked.is_empty()), 0, answers, 0, 0, 0, 0]);
    out.extend(asked);
    if let Verdict::Address(address) = verdict {
        // The name, as a pointer to the question's.
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
    fn a_name_is_read_in_lower_case() {
        let question = parse(&packet("Example.COM", 1)).unwrap().unwrap();
        assert_eq!(question, Question { name: "example.com".into(), kind: 1, class: 1 });
    }

    #[test]
    fn an_address_is_answered_with_the_question_and_its_id() {
        let asked = packet("example.com", 1);
        let out = reply(&asked, Verdict::Address(Ipv4Addr::new(198, 18, 0, 7)));
        assert_eq!(out[..8], [0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1]);
        assert_eq!(out[12..asked.len()], asked[12..]);
        assert_eq!(out[out.len() - 4..], [198, 18, 0, 7]);
    }

    #[test]
    fn a_refused_name_does_not_exist() {
        let out = reply(&packet("evil.example", 1), Verdict::NxDomain);
        assert_eq!(out[3] & 0x0f, 3);
        assert_eq!(out[6..8], [0, 0]);
    }

    #[test]
    fn what_is_not_a_question_is_told_so_or_left_alone() {
        assert_eq!(parse(&[1, 2, 3]), None);
        let mut answer = packet("example.com", 1);
        answer[2] |= 0x80;
        assert_eq!(parse(&answer), None);
        let mut two = packet("example.com", 1);
        two[5] = 2;
        assert_eq!(parse(&two), Some(Err(Verdict::FormErr)));
        let cut = &packet("example.com", 1)[..20];
        assert_eq!(parse(cut), Some(Err(Verdict::FormErr)));
        let mut pointer = packet("a", 1);
        pointer[12] = 0xc0;
        assert_eq!(parse(&pointer), Some(Err(Verdict::FormErr)));
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_is_never_amplified(packet in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Some(Err(verdict)) = parse(&packet) {
                prop_assert!(reply(&packet, verdict).len() <= packet.len());
            }
        }
    }
}
