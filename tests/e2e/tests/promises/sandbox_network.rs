//! The network of standalone sandboxes: names through a door, with and without a server.

use harvest_e2e::{FRESH, Host, OfflineHome};
use serde_json::Value;

use crate::network_rules::greeter;

/// Prints what the server at this port says first. `localhost.` is asked of the resolver.
fn greet(port: u16) -> String {
    format!("exec 3<>/dev/tcp/localhost./{port} && head -n 1 <&3")
}

#[tokio::test]
async fn exec_without_server_reaches_allowed_names() {
    let host = OfflineHome::new();
    let lookup = |flags: &[&str], name: &str| {
        let mut command = host.command();
        command.args(FRESH).args(flags).args(["--", "nslookup", name]);
        command.output().unwrap().status.success()
    };
    for (flags, name, works) in [
        (&["--net", "trusted"][..], "pypi.org", true),
        (&["--net", "trusted"], "example.org", false),
        (&["--net", "trusted"], "model.harvest.internal", false),
        (&["--net", "trusted", "--allow", "example.org"], "example.org", true),
        (&["--net", "full"], "example.org", true),
        (&["--allow", "example.org"], "example.org", true),
        (&["--allow", "example.org"], "pypi.org", false),
        (&[], "pypi.org", false),
    ] {
        assert_eq!(lookup(flags, name), works, "{flags:?} {name}");
    }
    let wrong = host.harvest(FRESH.iter().chain(&["--allow", "10.0.0.1", "--", "true"]));
    assert!(wrong.code != 0 && wrong.stderr.contains("not a host name"), "{wrong:?}");
    let both = ["--net", "host", "--allow", "example.org", "--", "true"];
    let both = host.harvest(FRESH.iter().chain(&both));
    assert!(both.code != 0 && both.stderr.contains("every name"), "{both:?}");
}

// The CLI blocks a thread.
#[tokio::test(flavor = "multi_thread")]
async fn standalone_sandbox_keeps_its_door_across_restarts() {
    let mut host = Host::start_with(&[("HARVEST_PRIVATE_HOSTS", "localhost")]).await;
    let port = greeter().await;
    let allow = format!("localhost:{port}");
    let created =
        host.harvest(["sandbox", "create", "--image", "agents", "--no-state", "--allow", &allow]);
    assert_eq!(created.code, 0, "{created:?}");
    let sandbox = created.stdout.trim().to_owned();
    let greeted = |host: &Host, sandbox: &str| {
        let ran = host.harvest(["exec", sandbox, "--", "bash", "-c", &greet(port)]);
        assert_eq!((ran.code, ran.stdout.as_str()), (0, "hello\n"), "{ran:?}");
    };
    greeted(&host, &sandbox);
    host.kill();
    host.up().await;
    greeted(&host, &sandbox);
    let forked = host.harvest(["sandbox", "fork", &sandbox]);
    greeted(&host, forked.stdout.trim());
    for verb in ["stop", "start"] {
        assert_eq!(host.harvest(["sandbox", verb, &sandbox]).code, 0, "{verb}");
    }
    greeted(&host, &sandbox);
    let list: Value =
        serde_json::from_str(&host.harvest(["sandbox", "ls", "--json"]).stdout).unwrap();
    assert!(list.to_string().contains(&allow), "{list}");
    let fresh = ["exec", "--image", "agents", "--no-state", "--allow", &allow, "--", "bash", "-c"];
    let ran = host.harvest(fresh.iter().map(|word| (*word).to_owned()).chain([greet(port)]));
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "hello\n"), "{ran:?}");
}

#[test]
fn build_steps_reach_only_allowed_names() {
    let host = OfflineHome::new();
    let build = |top: &str, step: &str, flags: &[&str]| {
        let recipe = host.path("image/net.toml");
        let text = format!("name = \"net\"\nfrom = \"tiny\"\n{top}\n[[step]]\nrun = \"{step}\"\n");
        std::fs::write(&recipe, text).unwrap();
        host.harvest(["image", "build", recipe.to_str().unwrap()].iter().chain(flags))
    };
    // The resolver of a door, which the host's network does not have.
    let has_no_door = "case $(cat /etc/resolv.conf) in *198.18.0.1*) exit 1;; esac";
    for (top, step, flags) in [
        ("", "nslookup pypi.org && ! nslookup example.org", &[][..]),
        ("allow = [\"example.org\"]", "nslookup example.org", &[]),
        ("network = \"host\"", has_no_door, &[]),
        ("", &format!("true; {has_no_door}"), &["--net", "host"]),
    ] {
        let built = build(top, step, flags);
        assert_eq!(built.code, 0, "{top} {step} {flags:?}: {built:?}");
    }
    let refused = build("", "nslookup example.org", &["--force"]);
    for words in ["refused a connection to example.org", "`allow = [\"NAME\"]`"] {
        assert!(refused.code != 0 && refused.stderr.contains(words), "{words}: {refused:?}");
    }
}
