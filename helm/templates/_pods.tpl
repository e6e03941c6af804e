{{/* Mount path of the bundle of trusted certificates: (root). */}}
{{- define "diptych.trustedCA" -}}
{{- with .root.Values.trustedCA }}{{ if .configMap }}/etc/diptych/trusted-ca/{{ .key }}{{ end }}{{ end }}
{{- end }}

{{/*
Current `replicas` of an autoscaled pool. If it were omitted, an upgrade that enables the autoscaler would remove the field,
and the API server would set it to 1. Empty if the object does not exist or there is no cluster: (root, name,
apiVersion, kind).
*/}}
{{- define "diptych.liveReplicas" -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name }}replicas: {{ int .spec.replicas }}{{ end }}
{{- end }}

{{/* Delay before SIGTERM: (root, seconds). */}}
{{- define "diptych.preStop" -}}
{{- if .seconds }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30-0" .root.Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ int .seconds }}}
    {{- else }}
    exec: {command: [sleep, {{ int .seconds | quote }}]}
    {{- end }}
{{- end }}
{{- end }}

{{/* Environment for writable folders, caches and trusted certificates: (root). */}}
{{- define "diptych.environment" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: HOME, value: /var/cache/diptych}
- {name: DIPTYCH_CACHE, value: /var/cache/diptych}
- {name: HF_HOME, value: /var/cache/diptych/huggingface}
- {name: TRITON_CACHE_DIR, value: /var/cache/diptych/triton}
{{- with include "diptych.trustedCA" . }}
- {name: SSL_CERT_FILE, value: {{ . | quote }}}
- {name: REQUESTS_CA_BUNDLE, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* Mounts of every container of a pod: (root, model). */}}
{{- define "diptych.modelMounts" -}}
- {name: cache, mountPath: /var/cache/diptych}
- {name: tmp, mountPath: /tmp}
{{- if has .model.source.type (list "pvc" "image") }}
- {name: model, mountPath: {{ include "diptych.modelFolder" . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Mounts of a router: (root, models). */}}
{{- define "diptych.routerMounts" -}}
{{- if eq (include "diptych.isShared" .) "" }}
{{- include "diptych.modelMounts" (dict "root" .root "model" (first .models)) }}
{{- else }}
- {name: cache, mountPath: /var/cache/diptych}
- {name: tmp, mountPath: /tmp}
{{- range .models }}
{{- if has .source.type (list "pvc" "image") }}
- {name: model-{{ .name }}, mountPath: {{ include "diptych.modelFolder" (dict "root" $.root "model" .) }}, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* User-defined mounts and the trusted certificates: (root, spec). */}}
{{- define "diptych.extraMounts" -}}
{{- if include "diptych.trustedCA" . }}
- {name: trusted-ca, mountPath: /etc/diptych/trusted-ca, readOnly: true}
{{- end }}
{{- with .spec.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diptych.secretMounts" -}}
{{- if .root.Values.curve.existingSecret }}
- {name: curve, mountPath: /etc/diptych/curve, readOnly: true}
{{- end }}
{{- if eq .role "router" }}
{{- if .root.Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/diptych/api-keys, readOnly: true}
{{- end }}
{{- if include "diptych.tlsSecret" .root }}
- {name: tls, mountPath: /etc/diptych/tls, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{/* Common value of a source key of all models; empty if they differ: (models, key). */}}
{{- define "diptych.sameInAll" -}}
{{- $said := list }}
{{- range .models }}{{ $said = append $said (toString (get .source $.key | default "")) }}{{ end }}
{{- if eq (len (uniq $said)) 1 }}{{ first $said }}{{ end }}
{{- end }}

{{/* Volumes: (root, role, models, config, spec). */}}
{{- define "diptych.volumes" -}}
{{- with .spec.extraVolumes }}
{{- toYaml . }}
{{ end -}}
{{- with .root.Values.trustedCA.configMap }}
- name: trusted-ca
  configMap: {name: {{ . | quote }}}
{{ end -}}
- name: config
  configMap: {name: {{ .config }}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- $claim := include "diptych.sameInAll" (dict "models" .models "key" "cacheClaim") }}
  {{- $size := include "diptych.sameInAll" (dict "models" .models "key" "cacheSize") }}
  {{- if $claim }}
  persistentVolumeClaim: {claimName: {{ $claim | quote }}}
  {{- else }}
  emptyDir: {{ if $size }}{sizeLimit: {{ $size | quote }}}{{ else }}{}{{ end }}
  {{- end }}
{{- $each := and (eq .role "router") (eq (include "diptych.isShared" .) "true") }}
{{- range .models }}
{{- if eq .source.type "pvc" }}
- name: {{ ternary (printf "model-%s" .name) "model" $each }}
  persistentVolumeClaim: {claimName: {{ .source.claimName | quote }}, readOnly: true}
{{- else if eq .source.type "image" }}
- name: {{ ternary (printf "model-%s" .name) "model" $each }}
  image: {reference: {{ trimPrefix "oci://" .source.reference | quote }}, pullPolicy: {{ .source.pullPolicy | default "IfNotPresent" }}}
{{- end }}
{{- end }}
{{- with .root.Values.curve.existingSecret }}
- name: curve
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- if eq .role "router" }}
{{- with .root.Values.apiKeys.existingSecret }}
- name: api-keys
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with include "diptych.tlsSecret" .root }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}

{{/*
Container that fetches a hub model and logs its progress: (root, kind, model, spec, container). For a router it fetches no
weights unless `weights` is set.
*/}}
{{- define "diptych.fetchContainer" -}}
- name: {{ .container | default "fetch-model" }}
  {{- include "diptych.imageOf" (dict "root" .root "kind" .kind "image" .spec.image "vendor" (.spec.accelerator | default dict).vendor "transport" .spec.settings.kv_transport "engine" .spec.engine) | nindent 2 }}
  command: [diptych, fetch]
  {{- $isForeign := eq (include "diptych.engineOf" (dict "root" .root "model" .model.name)) "vllm" }}
  args: [{{ .model.source.id | quote }}{{ if and (eq .kind "router") (not .weights) }}, --no-weights{{ else if $isForeign }}, --engine, vllm{{ end }}]
  env:
    {{- include "diptych.environment" (dict "root" .root) | nindent 4 }}
    - {name: TQDM_MININTERVAL, value: "10"}
    {{- with .spec.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .model.source.tokenSecret }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}}
    {{- end }}
  {{- with .spec.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml .spec.resources | nindent 4 }}
  {{- with .spec.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "diptych.modelMounts" . | nindent 4 }}
    {{- with include "diptych.extraMounts" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Pod fields other than containers: security, scheduling, DNS: (root, role, name, spec). */}}
{{- define "diptych.scheduling" -}}
{{- with .spec.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .spec.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .spec.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if .spec.hostPID }}
hostPID: true
{{- end }}
{{- with .spec.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ int (.maxSkew | default 1) }}
    whenUnsatisfiable: {{ .whenUnsatisfiable | default "ScheduleAnyway" }}
    {{- range $name, $value := pick . "minDomains" "nodeAffinityPolicy" "nodeTaintsPolicy" }}
    {{ $name }}: {{ $value }}
    {{- end }}
    # Spreads the pods of each revision separately, so that they are evenly spread after an update.
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "diptych.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
