//! Scenarios for certificates. Each step applies the writes of a plan to the observed state, until the plan contains no
//! further write.

mod lost;
mod story;

use std::collections::BTreeMap;
use std::time::Duration;

use api::names::{CertificateUse, certificate_secret};
use jiff::Timestamp;
use member::tls::Authorities;

use crate::authority::tests::rule;
use crate::authority::{Anchor, CaScope, Held, Leaf};
use crate::certificates::{CertificateWrite, Certificates};
use crate::clock::ApiServerClock;
use crate::plan::tests::scene::{Letters, Scene, at};
use crate::plan::tests::sent;
use crate::plan::tests::writes::{Plan, Write};
use crate::plan::{actions, plan};
use crate::reason::Reason;
use story::{MEMBERS, Story, held, is_of_certificates, issues, notifies, trusts};

#[test]
fn invariant_20_certificates_are_created_before_pod() {
    let mut story = Story::of(Scene::begun(&MEMBERS));
    for member in MEMBERS {
        story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).reserved(member);
    }
    let starts = |story: &Story| {
        let chains = story.plan().step.chains.into_iter();
        let with_pod = |writes: &Vec<Write>| {
            writes
                .iter()
                .any(|write| matches!(write, Write::CreatePod(_)))
        };
        chains.filter(with_pod).collect::<Vec<_>>()
    };
    assert!(
        starts(&story).is_empty(),
        "no pod may be created before the authorities exist"
    );
    let made = story.of_certificates();
    assert_eq!(
        made.len(),
        2,
        "the plan must create one authority for peers and one for clients: {made:?}"
    );
    for write in made {
        story.carry_out(&write);
    }
    let chains = starts(&story);
    assert_eq!(chains.len(), 3);
    for chain in chains {
        let issued = chain
            .iter()
            .filter(|write| matches!(write, Write::Certificate(_)));
        assert_eq!(issued.count(), 2, "{chain:?}");
        assert!(
            matches!(chain.last(), Some(Write::CreatePod(_))),
            "{chain:?}"
        );
        let at = |is: fn(&Write) -> bool| chain.iter().position(is);
        assert!(
            at(|write| matches!(write, Write::Certificate(_)))
                < at(|write| matches!(write, Write::MarkService { .. })),
            "a rejected certificate must leave no annotation `started`: {chain:?}"
        );
    }
}

/// The operator creates the Service, with the annotation `started`, before the certificates: certificates without a
/// Service count as remains of a removed member. After a rejected certificate, the annotation is removed.
#[test]
fn rejected_certificate_removes_started_annotation() {
    let issue = actions::certificate(CertificateWrite::Issue {
        owner: "db-a".into(),
        used: CertificateUse::Peer,
        over: None,
        by: "1".into(),
    });
    let part = issue.start.unwrap();
    assert!(part.is_undone(true) && part.is_undone(false));
}

/// Invariant 20: if the operator's clock is far ahead, every CA seems to have expired.
#[test]
fn invariant_20_no_certificate_is_renewed_while_clocks_differ() {
    let year = 365 * 86_400;
    let mut story = Story::formed(true);
    story.later(20 * year);
    let replaces = |write: &Write| {
        matches!(
            write,
            Write::Certificate(CertificateWrite::Authority { .. })
        )
    };
    assert!(story.of_certificates().iter().any(replaces));
    let clock = |seconds: u64| jiff::SignedDuration::from_secs(i64::try_from(seconds).unwrap());
    story.scene.observed.clock = ApiServerClock(Some(-clock(20 * year)));
    let said = |story: &Story| {
        let problems = story.plan().problems.into_iter();
        let texts = problems.filter(|problem| problem.reason == Reason::ClocksDiffer);
        texts.map(|problem| problem.message).collect::<Vec<_>>()
    };
    assert_eq!(story.of_certificates(), []);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
    assert!(said(&story)[0].contains("ahead of the API server's"));
    story.scene.desired.invalid = Some("a mistake in the spec".into());
    assert_eq!(story.of_certificates(), []);
    assert_eq!(said(&story).len(), 1);
    // The operator's clock is behind the API server's clock. By the operator's clock, no renewal is due.
    let mut story = Story::formed(true);
    story.scene.observed.clock = ApiServerClock(Some(clock(20 * year)));
    assert_eq!(story.of_certificates(), []);
    assert!(said(&story)[0].contains("behind the API server's"));
    // The clocks differ by 200 s, which is less than `SKEW`, so the operator reports nothing.
    story.scene.observed.clock = ApiServerClock(Some(-clock(200)));
    assert_eq!(said(&story), [] as [String; 0]);
    // The renewal of the certificates is now due by both clocks.
    story.later(rule().validity.as_secs() / 4 * 3);
    assert!(story.of_certificates().iter().any(issues));
}

#[test]
fn valid_certificates_are_not_rewritten() {
    let story = Story::formed(true);
    assert_eq!(story.of_certificates(), []);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
}

#[test]
fn certificates_are_renewed_at_two_thirds_of_validity_without_restart() {
    let mut story = Story::formed(false);
    let life = rule().validity.as_secs();
    story.later(life / 2);
    assert_eq!(story.of_certificates(), []);
    story.later(life / 5);
    story.settle();
    assert_eq!(
        story.count(issues),
        8,
        "the plan must issue two certificates per member, one for the operators, and one for clients"
    );
    assert_eq!(story.count(notifies), 3);
    assert_eq!(
        (story.outdated(), story.deleted()),
        (0, 0),
        "no member may be restarted"
    );
}

/// An invalid spec stops all changes except renewals.
#[test]
fn certificates_are_renewed_despite_invalid_spec() {
    let mut story = Story::formed(true);
    story.scene.desired.invalid = Some("spec.size is 0".into());
    assert_eq!(story.writes(), []);
    story.later(rule().validity.as_secs() * 3 / 4);
    let mut paused = story.scene.desired.clone();
    (paused.invalid, paused.paused) = (None, true);
    assert!(
        plan(&paused, &story.scene.observed, &Letters, story.now)
            .step
            .is_empty()
    );
    assert!(story.writes().iter().all(is_of_certificates));
    story.settle();
    assert_eq!(story.count(issues), 8);
    assert_eq!(story.writes(), []);
}

#[test]
fn expired_certificates_are_renewed_while_etcd_is_unreachable() {
    let mut story = Story::formed(false);
    story.later(2 * rule().validity.as_secs());
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    story.settle();
    assert_eq!(story.count(issues), 8);
    assert_eq!(story.deleted(), 0);
}

#[test]
fn new_server_name_reissues_only_server_certificates() {
    let mut story = Story::formed(true);
    let rule = story.certificates().rule.as_mut().unwrap();
    rule.server_names.push("etcd.example.net".into());
    let writes = story.of_certificates();
    let servers = |write: &Write| {
        matches!(
            write,
            Write::Certificate(CertificateWrite::Issue {
                used: CertificateUse::Server,
                ..
            })
        )
    };
    assert_eq!(writes.len(), 3);
    assert!(writes.iter().all(servers), "{writes:?}");
}

#[test]
fn grpc_proxies_share_one_certificate_that_is_renewed() {
    let mut story = Story::formed(true);
    story.certificates().rule.as_mut().unwrap().proxy = Some("db-proxy".into());
    let writes = story.of_certificates();
    let of_proxies = |write: &Write| {
        matches!(
            write,
            Write::Certificate(CertificateWrite::Issue { owner, used: CertificateUse::Proxy, .. }) if owner == "db"
        )
    };
    assert_eq!(writes.len(), 1);
    assert!(writes.iter().all(of_proxies), "{writes:?}");
    story.settle();
    assert_eq!(story.count(of_proxies), 1);
    assert_eq!(story.of_certificates(), []);
    story.later(rule().validity.as_secs() / 4 * 3);
    story.settle();
    assert_eq!(story.count(of_proxies), 2);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
}

#[test]
fn invariant_20_authority_is_rotated_in_steps_across_all_members() {
    let mut story = Story::formed(true);
    story.certificates().rule.as_mut().unwrap().rotate = Some("now".into());
    story.settle();
    let switches =
        |write: &Write| matches!(write, Write::Certificate(CertificateWrite::Switch { .. }));
    let prepares =
        |write: &Write| matches!(write, Write::Certificate(CertificateWrite::Prepare { .. }));
    let retires =
        |write: &Write| matches!(write, Write::Certificate(CertificateWrite::Retire { .. }));
    assert_eq!(story.count(prepares), 2);
    assert_eq!(
        story.count(issues),
        0,
        "no certificate may be issued again, because the same authority signs"
    );
    assert_eq!(
        story.count(trusts),
        8,
        "every Secret must trust both authorities"
    );
    assert_eq!(
        story.outdated(),
        3,
        "each member must restart with both authorities"
    );
    for member in &MEMBERS[..2] {
        story.restart(member);
        story.settle();
        assert_eq!(
            story.count(switches),
            0,
            "the next authority must not sign while one member does not trust it"
        );
    }
    story.restart(MEMBERS[2]);
    story.settle();
    assert_eq!(story.count(switches), 2);
    assert_eq!(
        story.count(issues),
        8,
        "the new authority must issue every certificate again"
    );
    assert_eq!(story.outdated(), 0);
    assert_eq!(
        story.count(retires),
        0,
        "the old authority must stay while clients load their certificates"
    );
    story.later(rule().validity.as_secs() / 3 + 600);
    story.settle();
    assert_eq!(story.count(retires), 2);
    assert_eq!(
        story.outdated(),
        3,
        "each member must restart without the former authority"
    );
    story.restart_all();
    story.settle();
    assert_eq!((story.outdated(), story.count(prepares)), (0, 2));
    assert_eq!(story.of_certificates(), []);
}

#[test]
fn lost_authority_is_trusted_alongside_its_successor() {
    let mut story = Story::formed(true);
    let before = story.authority(CaScope::Peers).trusts.clone();
    story.certificates().secrets.remove("db-peer-ca");
    let writes = story.of_certificates();
    let [
        Write::Certificate(CertificateWrite::Authority {
            scope: CaScope::Peers,
            extra_cas,
            over: None,
        }),
    ] = &*writes
    else {
        panic!("{writes:?}");
    };
    assert_eq!(extra_cas.len(), before.len());
    assert_eq!(story.deleted(), 0);
}

#[test]
fn expired_authorities_restart_members_with_volumes() {
    let mut story = Story::formed(true);
    story.later(rule().authority_validity.as_secs() + 60);
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    assert_eq!(
        story.deleted(),
        0,
        "the certificates must be renewed before any restart"
    );
    story.settle();
    assert_eq!(story.deleted(), 3);
    assert!(
        story
            .plan()
            .problems
            .iter()
            .all(|one| one.reason != Reason::AuthorityExpired)
    );
}

#[test]
fn expired_authorities_restart_no_member_without_volume() {
    let mut story = Story::formed(false);
    story.later(rule().authority_validity.as_secs() + 60);
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    story.settle();
    assert_eq!(story.deleted(), 0);
    assert!(
        story
            .plan()
            .problems
            .iter()
            .any(|one| one.reason == Reason::AuthorityExpired)
    );
}

/// Invariant 18: the change from static to generated certificates does not delete all pods at once.
#[test]
fn invariant_18_replaced_static_authorities_never_restart_members_together() {
    for durable in [true, false] {
        let mut story = Story::formed(durable);
        for noted in story.certificates().pods.values_mut() {
            noted.trust = Some("of-others@0".to_owned());
        }
        story.settle();
        assert_eq!(story.deleted(), 0);
        let problems = story.plan().problems;
        assert!(
            problems
                .iter()
                .all(|one| one.reason != Reason::AuthorityExpired)
        );
    }
}

#[test]
fn expired_authorities_restart_no_member_with_deleted_or_lost_volume() {
    let mut story = Story::formed(true);
    story.later(rule().authority_validity.as_secs() + 60);
    let scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    let members: Vec<String> = scene.observed.disks.keys().cloned().collect();
    let [first, second, _] = &*members else {
        panic!("{members:?}");
    };
    story.scene = scene.claim_deleted(first).volume_lost(second);
    story.settle();
    assert_eq!(story.deleted(), 1);
}

#[test]
fn certificate_secret_of_another_owner_is_unchanged() {
    let mut story = Story::of(Scene::begun(&MEMBERS));
    let mut theirs = held(None);
    theirs.owned = false;
    story
        .certificates()
        .secrets
        .insert("db-peer-ca".into(), theirs);
    let writes = story.of_certificates();
    assert!(writes.iter().all(|write| matches!(
        write,
        Write::Certificate(CertificateWrite::Authority {
            scope: CaScope::Clients,
            ..
        })
    )));
    assert!(
        story
            .plan()
            .problems
            .iter()
            .any(|one| one.reason == Reason::SecretNotOurs)
    );
}

#[test]
fn restore_seed_gets_certificates_before_it_is_a_member() {
    let mut story = Story::formed(true);
    story.scene.observed.claimed_by = Some("restore".into());
    story.certificates().seed = Some("db-ssssssssss".into());
    let writes = story.of_certificates();
    let is = |write: &Write| matches!(write, Write::Certificate(CertificateWrite::Issue { owner, .. }) if owner == "db-ssssssssss");
    assert_eq!(writes.len(), 2);
    assert!(writes.iter().all(is), "{writes:?}");
}
