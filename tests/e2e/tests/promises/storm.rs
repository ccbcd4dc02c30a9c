//! Promises 1 to 4 together: the server is killed fifty times at random moments while clients
//! create sessions, queue prompts and fork; on PostgreSQL fewer times, with its connections cut
//! too. The seed is printed; `HARVEST_STORM_SEED` repeats a run.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    path::Path,
    time::Duration,
};

use harvest_e2e::{Database, Host, Leftovers, Postgres, cgroup_of, eventually, names, parts};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, PromptStatus, Session},
    event::TurnOutcome,
};
use reqwest::Method;
use serde_json::{Value, json};

/// The size of a storm.
struct Storm {
    kills: usize,
    sessions: usize,
    /// Prompts per session.
    prompts: usize,
}

/// Marsaglia's xorshift: a small generator with a fixed seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A request until it is answered.
#[derive(Debug, Clone)]
enum Wish {
    Create { number: usize },
    Prompt { of: String, mark: String, millis: u64 },
    Fork { of: String, name: String },
}

/// Clients that repeat each request under its own idempotency key until it is answered.
#[derive(Default)]
struct People {
    wishes: VecDeque<Wish>,
    known: BTreeMap<String, SessionId>,
    /// The prompts of each session, in order.
    marks: BTreeMap<String, Vec<String>>,
    replayed: usize,
    answered: usize,
}

fn script(mark: &str, millis: u64) -> String {
    let command = format!("echo {mark} >> /home/harvest/ran; sleep {:.3}", millis as f64 / 1000.0);
    format!("{mark}\nscript: {}", json!([{ "bash": command }, { "text": "done" }]))
}

impl People {
    fn new(storm: &Storm, dice: &mut Dice) -> Self {
        let mut wishes: VecDeque<Wish> =
            (0..storm.sessions).map(|number| Wish::Create { number }).collect();
        for round in 0..storm.prompts {
            for number in 0..storm.sessions {
                let (of, mark) = (format!("s{number}"), format!("s{number}p{round}"));
                wishes.push_back(Wish::Prompt { of: of.clone(), mark, millis: dice.below(400) });
                if round > 1 && dice.below(12) == 0 {
                    let name = format!("f{}", wishes.len());
                    wishes.push_back(Wish::Fork { of, name: name.clone() });
                    let mark = format!("{name}p0");
                    wishes.push_back(Wish::Prompt { of: name, mark, millis: dice.below(300) });
                }
            }
        }
        Self { wishes, ..Self::default() }
    }

    /// Sends one request after the other until all are answered.
    async fn ask(&mut self, host: &Host, dice: &mut Dice, pace: u64) {
        while let Some(wish) = self.wishes.front().cloned() {
            if pace > 0 {
                tokio::time::sleep(Duration::from_millis(dice.below(pace))).await;
            }
            if self.grant(host, &wish).await {
                self.wishes.pop_front();
                self.answered += 1;
            } else {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Sends the request once; returns whether it was answered.
    async fn grant(&mut self, host: &Host, wish: &Wish) -> bool {
        let (key, path, body) = match wish {
            Wish::Create { number } => {
                let body = json!({ "agent": "scripted", "network": "none", "prompt": script(&format!("s{number}first"), 100) });
                (format!("create-{number}"), "/v1/sessions".to_owned(), body)
            }
            Wish::Prompt { of, mark, millis } => {
                let path = format!("/v1/sessions/{}/prompts", self.known[of]);
                (format!("prompt-{mark}"), path, json!({ "text": script(mark, *millis) }))
            }
            Wish::Fork { of, name } => {
                let path = format!("/v1/sessions/{}/fork", self.known[of]);
                (format!("fork-{name}"), path, json!({}))
            }
        };
        let sent = host
            .request(Method::POST, &path)
            .header("idempotency-key", &key)
            .json(&body)
            .send()
            .await;
        let Ok(answer) = sent else { return false };
        let (status, headers) = (answer.status(), answer.headers().clone());
        let Ok(answer) = answer.json::<Value>().await else { return false };
        // A starting or stopping server refuses; before its first turn ends a session cannot fork.
        if matches!(answer["code"].as_str(), Some("stopping" | "no_snapshot" | "in_progress")) {
            return false;
        }
        assert!(status.is_success(), "{wish:?}: {status} {answer}");
        self.replayed += usize::from(headers.contains_key("idempotency-replayed"));
        self.learn(wish, &answer);
        true
    }

    fn learn(&mut self, wish: &Wish, answer: &Value) {
        let id = |answer: &Value| answer["id"].as_str().unwrap().parse().unwrap();
        match wish {
            Wish::Create { number } => {
                self.known.insert(format!("s{number}"), id(answer));
                self.marks.insert(format!("s{number}"), vec![format!("s{number}first")]);
            }
            Wish::Prompt { of, mark, .. } => self.marks.get_mut(of).unwrap().push(mark.clone()),
            Wish::Fork { name, .. } => {
                let fork = answer.get("items").map_or(answer, |items| &items[0]);
                self.known.insert(name.clone(), id(fork));
                self.marks.insert(name.clone(), Vec::new());
            }
        }
    }
}

#[tokio::test]
async fn fifty_kills_lose_repeat_and_leak_nothing() {
    rages(&Storm { kills: 50, sessions: 5, prompts: 12 }, None).await;
}

#[tokio::test]
async fn kill_storm_on_postgres_loses_nothing() {
    rages(&Storm { kills: 15, sessions: 3, prompts: 6 }, Some(Postgres::shared().database())).await;
}

async fn rages(storm: &Storm, database: Option<Database>) {
    let seed = std::env::var("HARVEST_STORM_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or(0x5EED_0004);
    println!("HARVEST_STORM_SEED={seed}");
    let mut dice = Dice(seed);
    let url = database.as_ref().map(Database::url).unwrap_or_default();
    // One slot fewer than sessions, so that one is always waiting.
    let places = (storm.sessions - 1).to_string();
    let mut host = Host::start_with(&[
        ("HARVEST_DATABASE", &url),
        ("HARVEST_LIMITS_SANDBOXES", &places),
        ("HARVEST_CLOCKS_IDLE_FREEZE", "150ms"),
        ("HARVEST_CLOCKS_IDLE_PAUSE", "600ms"),
    ])
    .await;
    let mut people = People::new(storm, &mut dice);
    for round in 0..storm.kills {
        // As in a restart of the database while the server is busy.
        if let Some(database) = database.as_ref().filter(|_| round % 3 == 1) {
            host.ready().await;
            database.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND pid <> pg_backend_pid()",
            );
        }
        let fuse = Duration::from_millis(dice.below(900));
        let asking = async {
            people.ask(&host, &mut dice, 300).await;
            std::future::pending::<()>().await;
        };
        let _ = tokio::time::timeout(fuse, asking).await;
        host.kill();
        host.launch();
    }
    host.ready().await;
    people.ask(&host, &mut dice, 0).await;
    println!("{} answered, {} of them a second time", people.answered, people.replayed);
    let sessions = all(&host).await;
    let known: BTreeSet<_> = people.known.values().cloned().collect();
    assert_eq!(
        sessions.iter().map(|one| one.id.clone()).collect::<BTreeSet<_>>(),
        known,
        "one for each wish"
    );
    for (name, id) in &people.known {
        everything_ran_once(&host, id, &people.marks[name]).await;
    }
    everything_has_an_owner(&host).await;
    for id in people.known.values() {
        let gone =
            host.request(Method::DELETE, &format!("/v1/sessions/{id}")).send().await.unwrap();
        assert!(gone.status().is_success(), "{gone:?}");
    }
    nothing_is_left(host).await;
}

async fn all(host: &Host) -> Vec<Session> {
    let page: Value =
        host.get("/v1/sessions?limit=200").send().await.unwrap().json().await.unwrap();
    serde_json::from_value(page["items"].clone()).unwrap()
}

/// Waits until the session is idle, then counts its prompts and events.
async fn everything_ran_once(host: &Host, id: &SessionId, marks: &[String]) {
    let prompts = eventually("every prompt to be over", || async {
        let page: Value =
            host.get(&format!("/v1/sessions/{id}/prompts")).send().await.ok()?.json().await.ok()?;
        let prompts: Vec<Prompt> = serde_json::from_value(page["items"].clone()).unwrap();
        let waits =
            |one: &Prompt| matches!(one.status, PromptStatus::Queued | PromptStatus::Dispatched);
        (!prompts.iter().any(waits)).then_some(prompts)
    })
    .await;
    let asked: Vec<&str> = prompts.iter().map(|one| one.text.lines().next().unwrap()).collect();
    assert_eq!(asked, marks, "each prompt is in the queue once, in its order");
    // Follows from the beginning and asserts gapless sequence numbers.
    let events = host.events(id).await;
    for prompt in &prompts {
        let ends: Vec<_> = events
            .iter()
            .filter_map(|body| match body {
                EventBody::TurnEnded { prompt: of, outcome, .. } if *of == prompt.id => {
                    Some(*outcome)
                }
                _ => None,
            })
            .collect();
        // No sandbox died, so no turn may be interrupted.
        assert_eq!(ends, [TurnOutcome::Completed], "{} of {id}", prompt.text);
        assert_eq!(prompt.status, PromptStatus::Completed);
    }
    let (_, ran) = host.exec(id, "harvest", "cat /home/harvest/ran 2>/dev/null").await;
    let ran: Vec<&str> = ran.lines().collect();
    // A fork starts with its source's history.
    let own: Vec<&str> =
        ran.iter().filter(|mark| marks.iter().any(|own| own == *mark)).copied().collect();
    assert_eq!(own, marks, "each ran once, in its order: {ran:?}");
    assert_eq!(ran.iter().collect::<BTreeSet<_>>().len(), ran.len(), "nothing ran twice: {ran:?}");
}

/// Compares the sessions' records with the sandboxes and snapshots on the host.
async fn everything_has_an_owner(host: &Host) {
    let group = cgroup_of(host.home()).expect("a zygote lives");
    let told = RefCell::new(String::new());
    eventually("the host to hold exactly what the sessions hold", || async {
        let wrong = disagreement(host, &group).await?;
        if wrong != *told.borrow() {
            println!("{wrong}");
        }
        wrong.is_empty().then_some(()).or_else(|| {
            told.replace(wrong);
            None
        })
    })
    .await;
    let waste = host.harvest(["gc", "--dry-run", "--json"]);
    let waste: Value = serde_json::from_str(&waste.stdout).unwrap();
    assert_eq!((&waste["layers"], &waste["sandboxes"]), (&json!([]), &json!([])), "{waste}");
}

/// Sandboxes and snapshots without a session, or the reverse.
async fn disagreement(host: &Host, group: &str) -> Option<String> {
    let (mut sandboxes, mut snapshots) = (BTreeSet::new(), BTreeSet::new());
    for session in all(host).await {
        sandboxes.extend(session.sandbox.map(|id| id.part().to_owned()));
        let path = format!("/v1/sessions/{}/snapshots", session.id);
        let page: Value = host.get(&path).send().await.ok()?.json().await.ok()?;
        let ids = page["items"].as_array()?.iter().filter_map(|one| one["id"].as_str());
        snapshots.extend(ids.map(|id| id.trim_start_matches("snp_").to_owned() + ".json"));
    }
    let compare = |what: &str, there: &BTreeSet<String>, owned: &BTreeSet<String>| {
        let differ: Vec<_> = there.symmetric_difference(owned).collect();
        if differ.is_empty() { String::new() } else { format!("{what}: {differ:?} ") }
    };
    let home = host.home();
    let cgroups = sandboxes.iter().map(|part| cgroup(home, part)).collect();
    let groups = parts(group).intersection(&cgroups).cloned().collect();
    Some(
        compare("sandboxes", &names(&home.join("sandboxes")), &sandboxes)
            + &compare("snapshots", &names(&home.join("snapshots")), &snapshots)
            + &compare("cgroups", &groups, &cgroups),
    )
}

/// The name of a running sandbox's cgroups, which is its standby's.
fn cgroup(home: &Path, part: &str) -> String {
    let state = fs::read(home.join("sandboxes").join(part).join("state.json")).unwrap_or_default();
    let state: Value = serde_json::from_slice(&state).unwrap_or_default();
    state["cgroup"].as_str().unwrap_or_default().to_owned()
}

/// After deleting all sessions only standby sandboxes are left, and after `gc --all` none.
async fn nothing_is_left(mut host: Host) {
    let (home, group) = (host.home().to_owned(), cgroup_of(host.home()).expect("a zygote lives"));
    eventually("everything to be given back", || async {
        let empty = |folder: &str| names(&home.join(folder)).is_empty();
        ["sandboxes", "snapshots", "layers", "partial", "trash"]
            .into_iter()
            .all(empty)
            .then_some(())
    })
    .await;
    host.kill();
    let swept = host.harvest(["gc", "--all", "--yes", "--json"]);
    assert_eq!(swept.code, 0, "{swept:?}");
    let told = RefCell::new(Leftovers::default());
    eventually("nothing of the home to be left", || async {
        let left = Leftovers::of(&home, Some(&group));
        if left == Leftovers::default() {
            return Some(());
        }
        if left != told.replace(left.clone()) {
            println!("{left:?}");
        }
        None
    })
    .await;
}
